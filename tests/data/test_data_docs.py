"""The code blocks of docs/data.md run and print what their comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_block(block, capsys):
    exec(compile(block, str(DOCS), "exec"), {})
    printed = capsys.readouterr().out
    for promised in re.findall(r"^print\(.*\)  # (.*)$", block, flags=re.MULTILINE):
        if not promised.startswith("per channel"):  # words, not output
            assert promised in printed


def test_there_are_blocks():
    assert len(BLOCKS) == 3
