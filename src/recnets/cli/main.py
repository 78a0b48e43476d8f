"""`recnet COMMAND …`: finds the command's module, lets tyro read the arguments, and keeps errors to a clean line.

A command is a module in this folder with an attribute `command`: a typed function, whose parameters become the
arguments and whose docstring becomes the help, or a dataclass with a `run()` method. What it returns is the exit
status; None is success. A module that reads its arguments itself has `parse(args, prog)` instead, which returns the
work as a function. Only the module of the command that is asked for is imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recnets.errors import Misuse, RecNetsError
from recnets.utils import did_you_mean

FAILED, MISUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


class Entry(NamedTuple):
    """A row of the table of commands."""

    name: str
    module: str
    summary: str


# In the order a newcomer would use them. A module that is not installed is simply not mounted.
COMMANDS = (
    Entry("list", "list_", "models that can be built by name, with their sizes"),
    Entry("info", "info", "one model layer by layer: parameters, multiply-adds, memory"),
    Entry("train", "train", "train a model on a data set"),
    Entry("eval", "evaluate", "accuracy of trained weights on a data set"),
    Entry("predict", "predict", "classify pictures with trained weights"),
    Entry("export", "export", "write trained weights as ONNX or another exchange format"),
    Entry("squeeze", "squeeze", "make trained weights smaller and faster to run"),
    Entry("bench", "bench", "time a model on this machine"),
    Entry("reproduce", "reproduce", "train every network of one of the paper's tables"),
    Entry("tables", "tables", "write the paper's tables and figures beside what was measured here"),
)


def mounted() -> dict[str, Entry]:
    """The commands whose modules exist, by name."""
    return {e.name: e for e in COMMANDS if importlib.util.find_spec(f"recnets.cli.{e.module}") is not None}


def usage() -> str:
    """The text of `recnet --help`."""
    commands = mounted()
    width = max(len(name) for name in commands)
    rows = "\n".join(f"  {name:{width}}  {entry.summary}" for name, entry in commands.items())
    return f"""usage: recnet COMMAND [ARGUMENTS …]

RecNets: compact image classifiers that run a small recurrent network across the channels.

commands:
{rows}

options:
  -h, --help  this text; `recnet COMMAND --help` explains one command
  --version   the version of recnets and of PyTorch

A first look:
  recnet list 'recnet_60*'
  recnet info recnet_60_1280

Status 0 is success, 1 work that failed, 2 wrong use. RECNETS_TRACEBACK=1 shows where an error comes from.
"""


def version() -> str:
    """The text of `recnet --version`."""
    from recnets.utils import versions

    found = versions()
    return (
        f"recnets {found.get('recnets', 'unknown')} (torch {found.get('torch', 'unknown')}, python {found['python']})"
    )


def parse(argv: Sequence[str]) -> Callable[[], Any]:
    """Read `COMMAND ARGUMENTS …` and return the work, not yet done. Wrong use raises SystemExit(2) or ValueError."""
    import tyro

    name, *rest = argv
    commands = mounted()
    if name not in commands:
        what = "option" if name.startswith("-") else "command"
        raise ValueError(f"unknown {what} {name!r}{did_you_mean(name, commands)} (`recnet --help` lists the commands)")
    entry = commands[name]
    module = importlib.import_module(f"recnets.cli.{entry.module}")
    if hasattr(module, "parse"):  # defaults that depend on the arguments
        return module.parse(rest, f"recnet {name}")
    target = module.command
    if isinstance(target, type):
        parsed: Any = tyro.cli(target, prog=f"recnet {name}", args=rest, config=(tyro.conf.FlagCreatePairsOff,))
        return parsed.run

    @functools.wraps(target)
    def bind(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(target, *args, **kwargs)

    return tyro.cli(bind, prog=f"recnet {name}", args=rest, config=(tyro.conf.FlagCreatePairsOff,))


def _say(message: str) -> None:
    """In red on stderr (no colour where stderr is not a terminal): one line, or those that the message is made of."""
    from rich.console import Console
    from rich.text import Text

    lines = "\n".join(line.rstrip() for line in message.strip().splitlines())
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {lines}", style="bold red"))


def _raised_here(error: BaseException) -> bool:
    """Was it our code that raised? A ValueError from the depths of a library is a bug and deserves its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(__file__).resolve().parents[1] in Path(frames[-1].filename).resolve().parents


def _status_of(error: Exception) -> int:
    """Print an error that a user can act on and return the exit status; raise any other again."""
    if os.environ.get("RECNETS_TRACEBACK"):
        raise error
    if isinstance(error, RecNetsError):
        _say(str(error))
        return MISUSED if isinstance(error, Misuse) else FAILED
    if isinstance(error, ValueError | TypeError) and _raised_here(error):
        _say(str(error))
        return MISUSED
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        _say(f"{where}{error.strerror or error}")
        return FAILED
    if type(error).__name__ == "OutOfMemoryError":
        _say(f"{str(error).splitlines()[0]} Try a smaller batch or model.")
        return FAILED
    raise error


def _print_anything() -> None:
    """A "?" for what a stream cannot show: a name that is no UTF-8, or "…" where the terminal is not of this age."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    _print_anything()
    try:
        if not args or args[0] in ("-h", "--help", "help"):
            print(usage(), end="", file=sys.stdout if args else sys.stderr, flush=True)
            return 0 if args else MISUSED
        if args[0] == "--version":
            print(version(), flush=True)
            return 0
        status = parse(args)()
        sys.stdout.flush()
        return int(status or 0)
    except BrokenPipeError:
        # The reader (head, less) has gone. Python flushes stdout once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _status_of(error)
