"""A lower folder never imports a higher one: read from the source, so that imports inside functions count too."""

import ast
from pathlib import Path

import pytest

import recnets

ROOT = Path(recnets.__file__).parent
ORDER = [
    "errors",
    "utils",
    "ops",
    "layers",
    "models",
    "data",
    "training",
    "experiments",
    "deploy",
    "timm",
    "cli",
    "__main__",
]
FILES = sorted(p for p in ROOT.rglob("*.py") if p.name != "__init__.py" or p.parent != ROOT)


def part_of(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported_parts(source, package=()):
    """(line, part of recnets) for every import of ours in a module of the given package."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["recnets", *package][: len(package) + 2 - node.level] if node.level else []
            base = above + (node.module or "").split(".") if node.module else above
            names = [[*base, alias.name] for alias in node.names]
        found += [(node.lineno, name[1]) for name in names if name[0] == "recnets" and len(name) > 1]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    own = part_of(path)
    assert own in ORDER, f"{own} has no place in the order {ORDER}"
    package = path.relative_to(ROOT).parts[:-1]
    for line, part in imported_parts(path.read_text(encoding="utf-8"), package):
        # A name that is no part (e.g. `from recnets import create_model`) comes from the package's top.
        assert part in ORDER, f"line {line} imports {part} from the package's top: name its module"
        assert ORDER.index(part) <= ORDER.index(own), f"line {line} of {own} imports {part}, which stands above it"


def test_the_reader_of_imports_sees_them():
    source = (
        "import recnets.cli.main\ndef f():\n    from recnets import deploy\n    from ..data import x\nfrom . import y\n"
    )
    assert sorted(imported_parts(source, ("ops", "triton"))) == [(1, "cli"), (3, "deploy"), (4, "ops"), (5, "ops")]
    assert (4, "data") in imported_parts(source, ("ops",))
