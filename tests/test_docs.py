"""The documentation is true: Python blocks run, and every `recnet` line is one the command line accepts."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from recnets.cli.main import mounted, parse
from recnets.errors import RecNetsError
from recnets.models import list_models, model_info

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
# These have tests of their own: one compares what is printed, one runs the commands in between.
ELSEWHERE = ("data.md", "deploy.md")
WITH_PYTHON = [p for p in PAGES if p.name not in ELSEWHERE and "```python" in p.read_text(encoding="utf-8")]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_blocks_too_long_to_run_import_what_exists():
    """A block marked `python notest` (hours of training, say) must still compile and name things that are there."""
    for page in PAGES:
        for block in blocks(page, "python notest"):
            compile(block, str(page), "exec")
            for line in re.findall(r"^(?:from|import) .*$", block, flags=re.MULTILINE):
                exec(line, {})


def recnet_lines(page: Path) -> list[str]:
    """Every command line of `recnet` in the shell blocks, without what comes before it, and in running text."""
    found = []
    for block in blocks(page, "(?:bash|sh|console)"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;|\|", line.split(" #")[0]):
                command = re.match(r"\s*(?:\$ )?(?:\S*bin/)?recnet (.*)", part)
                if command:
                    found.append(command.group(1))
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return found + [line for line in re.findall(r"`recnet ([^`]+)`", prose) if "…" not in line]


COMMANDS = sorted({(page.name, line) for page in PAGES for line in recnet_lines(page)})


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In order and in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{p}: {c}"[:60] for p, c in COMMANDS])
def test_command_lines_parse(page, line, capsys):
    arguments = shlex.split(line)
    if arguments == ["--version"] or arguments == ["--help"]:
        return
    if len(arguments) == 1:  # prose that names a command
        assert arguments[0] in mounted()
        return
    code = 0
    try:
        parse(arguments)
    except RecNetsError:
        return  # the options are right, and the reader's own run or file is not here
    except SystemExit as stopped:
        code = stopped.code  # 0 for --help
    assert code == 0, f"{page}: recnet {line}\n{capsys.readouterr().err}"


def test_commands_are_found():
    assert ("README.md", "info recnet_60_1280") in COMMANDS
    assert ("README.md", "train") in COMMANDS


def test_every_link_and_picture_exists():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.name} points at {target}"


def test_command_installs_every_extra():
    """The test command brings what the whole suite needs; a new extra must not be forgotten there."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    line = re.search(r"^python3 -m venv \.venv-test .* -m pytest.*$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert line
    installed = re.search(r'-e "\.\[(.*?)\]"', line.group())
    assert installed
    assert set(installed.group(1).split(",")) == set(extras)
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_constraints_name_every_direct_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    direct = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert {re.split(r"[^\w-]", d)[0] for d in direct} - {"recnets"} <= pinned  # an extra may name another


def test_readme_table_is_what_recnet_list_counts():
    from recnets.cli.list_ import describe

    table = re.findall(r"^\| `(recnet_\w+)` \| (.*) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name, _ in table] == list_models("recnet_*")
    for name, cells in table:
        row = describe(name, num_classes=100, image_size=32)
        numbers = ", ".join(str(n) for n in (row["e"], *row["s"], *row["d"]))
        assert cells.split(" | ") == [
            *(numbers, f"{row['parameters']:,}", f"{row['parameters_hidden_head']:,}"),
            *(model_info(name).paper_params, f"{row['macs'] / 1e6:,.0f}M"),
        ]


@pytest.mark.parametrize("drawing", ["recurrent"])
def test_drawings_are_what_their_scripts_draw(drawing, load_script):
    script = load_script(f"draw_{drawing}")
    assert script.OUT.read_text(encoding="utf-8") == script.draw()
