"""`recnet list`."""

from __future__ import annotations

from typing import Annotated

import tyro

from recnets.models import list_models


def command(pattern: Annotated[str, tyro.conf.Positional] = "*", /, *, json: bool = False) -> int:
    """Models that can be built by name.

    Args:
        pattern: shell pattern for the names, such as 'recnet_60*'.
        json: print JSON, for programs.
    """
    print("\n".join(list_models(pattern)))
    return 0
