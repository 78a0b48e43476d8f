"""`python -m recnets.experiments reproduce …` and `… tables …`: the commands for machines with bare PyTorch.

The `recnet` command reads its arguments with tyro; a compute node that has only PyTorch and numpy can do without.
The options are those of `recnet reproduce` and `recnet tables`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

from recnets.errors import Misuse, RecNetsError
from recnets.experiments.make_tables import Tables
from recnets.experiments.reproduce import Reproduce

COMMANDS: dict[str, type[Reproduce] | type[Tables]] = {"reproduce": Reproduce, "tables": Tables}


def _add_option(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> None:
    flag, default = "--" + field.name.replace("_", "-"), field.default
    if hint is bool:
        name = flag if not default else f"--no-{flag[2:]}"
        parser.add_argument(name, dest=field.name, action="store_const", const=not default, default=default)
        return
    parts = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        kind = next(part for part in parts if part is not type(None))
        parser.add_argument(flag, type=kind, default=default, help=f"default: {default}")
    elif typing.get_origin(hint) is tuple:
        parser.add_argument(flag, type=parts[0], nargs="*", default=default)
    elif typing.get_origin(hint) is typing.Literal:
        parser.add_argument(flag, choices=parts, default=default)
    else:
        parser.add_argument(flag, type=hint, default=default, help=f"default: {default}")


def parse(argv: Sequence[str]) -> Reproduce | Tables:
    """The command that the arguments describe."""
    parser = argparse.ArgumentParser(prog="python -m recnets.experiments", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, kind in COMMANDS.items():
        below = commands.add_parser(name, description=kind.__doc__, formatter_class=argparse.RawTextHelpFormatter)
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            _add_option(below, field, hints[field.name])
    values = vars(parser.parse_args(argv))
    command: Any = COMMANDS[values.pop("command")]
    return command(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def main(argv: Sequence[str] | None = None) -> int:
    """The same statuses as `recnet`: 0 for success, 1 for failed work, 2 for wrong use, 130 for Ctrl-C."""
    try:
        return parse(sys.argv[1:] if argv is None else argv).run()
    except (RecNetsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RecNetsError) and not isinstance(error, Misuse) else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
