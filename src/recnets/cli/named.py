"""What a command's MODEL means: a network by name, or trained weights."""

from __future__ import annotations

from pathlib import Path

from recnets.models import list_models, published
from recnets.models.registry import canonical_name
from recnets.models.weights import SUFFIX


def names_weights(name: str) -> bool:
    """Does it mean trained weights (published, a file, a run folder)? A network's own name comes before a folder's."""
    if canonical_name(name) in list_models():
        return False
    path = Path(name).expanduser()
    return name in published() or path.exists() or path.suffix == SUFFIX or "/" in name
