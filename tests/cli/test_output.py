"""What commands print: names as they are, on any stream."""

from __future__ import annotations

import pytest

from recnets.cli.output import console, table

NAMES = ("[red] cats", "[/]", ":cat:", "<b>")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_no_markup(name, capsys):
    made = table(name, {name: "left"})
    made.add_row(name)
    console().print(made)
    console().print(f"{name} on a line of its own")
    text = capsys.readouterr().out
    assert text.count(name) == 4
    assert f"│ {name} " in text
