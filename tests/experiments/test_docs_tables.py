"""Every command of docs/tables.md is one that the command line understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from recnets.cli.main import parse

TEXT = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.startswith("recnet ")]
INLINE = [text for text in re.findall(r"`(recnet [^`…]*)`", TEXT) if text not in ("recnet reproduce", "recnet tables")]


def test_there_are_commands():
    assert len(LINES) >= 8
    assert len(INLINE) >= 2


@pytest.mark.parametrize("line", [*LINES, *INLINE])
def test_the_command_is_understood(line):
    assert callable(parse(shlex.split(line, comments=True)[1:]))
