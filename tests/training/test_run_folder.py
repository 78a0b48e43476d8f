from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from recnets.cli.train import parse
from recnets.errors import RecNetsError
from recnets.training import Recipe, RunFolder, RunOptions, load_recipe
from recnets.training.run import own_command
from recnets.training.run_folder import default_run_path, to_toml


def test_toml_comes_back() -> None:
    values = {
        "text": 'a "quoted" \\ line\nand tab\t, é, 😀 \x7f',
        "odd key": 1,
        "numbers": [1, 2.5, -3e-10],
        "inf": float("inf"),
        "flags": [True, False],
        "table": {"inner": {"x": 1}, "empty": {}},
        "rows": [{"a": 1, "deep": {"b": [1]}}, {"a": 2}],
        "mixed": [["x", 1], {"k": 0.1}],
    }
    assert tomllib.loads(to_toml(values)) == values
    assert tomllib.loads(to_toml({"a": None, "b": 1})) == {"b": 1}


def test_config_keeps_every_session(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    recipe = load_recipe("paper", model_options={"head": "hidden", "d": [1, 2, 3]}, image_size=24)
    folder.write_config(recipe, {"command": "first", "options": {"compile": True}})
    folder.write_config(recipe, {"command": "second"})
    assert folder.read_recipe() == recipe
    assert [s["command"] for s in folder.read_config()["session"]] == ["first", "second"]


def test_a_resume_keeps_the_options_but_for_the_limits(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    options = {"data_dir": "/data", "compile": True, "max_seconds": 5.0, "epochs_until": 3, "from_the_future": 1}
    folder.write_config(Recipe(), {"options": {"compile": False}})
    folder.write_config(Recipe(), {"options": options})
    assert folder.read_options() == RunOptions(data_dir=Path("/data"), compile=True)
    parsed = parse(["--resume", str(tmp_path), "--max-seconds", "9"], "recnet train").__self__  # type: ignore[attr-defined]
    assert parsed.options == RunOptions(data_dir=Path("/data"), compile=True, max_seconds=9.0)


def test_metrics_are_cut_to_what_is_known(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for epoch in (1, 2, 3):
        folder.add_metrics({"epoch": epoch})
    folder.rewrite_metrics([{"epoch": 1}])
    folder.add_metrics({"epoch": 2, "again": True})
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert rows == [{"epoch": 1}, {"epoch": 2, "again": True}]


def test_leftovers_of_a_kill_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.pt.abc.tmp").write_bytes(b"half")
    (tmp_path / ".somebody-elses.tmp").write_bytes(b"whole")
    folder = RunFolder(tmp_path)
    folder.claim()
    assert {p.name for p in tmp_path.iterdir()} == {".lock", ".somebody-elses.tmp"}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["report.html", "summary.json", "metrics.jsonl", "last.safetensors", "config.toml"])
def test_files_of_others_are_in_the_way(tmp_path: Path, name: str, resume: bool) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "notes.txt").write_text("no concern of a run")
    folder.check(resume)
    (tmp_path / name).write_text("a = 1\n")
    with pytest.raises(RecNetsError, match=f"{re.escape(str(tmp_path / name))} is in the way"):
        folder.check(resume)


def test_json_without_nan(tmp_path: Path) -> None:
    with pytest.raises(RecNetsError, match="not a finite number"):
        RunFolder(tmp_path).add_metrics({"epoch": 1, "test_loss": float("nan")})
    assert RunFolder(tmp_path).metrics.read_text() == ""


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
def test_a_folder_has_one_trainer(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.claim()
    try_it = (
        "import fcntl, sys; f = open(sys.argv[1], 'w')\n"
        "try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError: print('held')\n"
    )
    shown = subprocess.run([sys.executable, "-c", try_it, tmp_path / ".lock"], capture_output=True, text=True)
    assert shown.stdout == "held\n"
    with pytest.raises(RecNetsError, match="another process is training"):
        RunFolder(tmp_path).claim()
    folder.release()
    RunFolder(tmp_path).claim()


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecNetsError, match="cannot write to the run folder"):
        RunFolder(tmp_path / "file" / "run").claim()


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RecNetsError, match="holds no run to resume"):
        RunFolder(tmp_path / "none").read_recipe()
    (tmp_path / "config.toml").write_text("broken [")
    with pytest.raises(RecNetsError, match="cannot be read"):
        RunFolder(tmp_path).read_recipe()
    for text in ("a = 1", "recipe = 3"):
        (tmp_path / "config.toml").write_text(text)
        with pytest.raises(RecNetsError, match=r"is no run's: it has no table \[recipe\]"):
            parse(["--resume", str(tmp_path)], "recnet train")
    (tmp_path / "config.toml").write_text("session = 3\n[recipe]\n")
    with pytest.raises(RecNetsError, match=r"is no run's: its sessions are 3"):
        parse(["--resume", str(tmp_path)], "recnet train")


def test_default_names_are_free_and_readable(tmp_path: Path) -> None:
    recipe = Recipe(model="RecNet(4, 4, 8, 16, 3, 3, 3)", data="folder:/pictures/my cats/")
    seen = set()
    for _ in range(3):
        path = default_run_path(recipe, tmp_path)
        path.mkdir()
        seen.add(path)
        assert "recnet-4-4-8-16-3-3-3-my-cats" in path.name
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/home/me/.venv/bin/recnet", "train", "--out", "a b"], "recnet train --out 'a b'"),
        (["/home/me/src/recnets/__main__.py", "train"], "python -m recnets train"),
    ],
)
def test_a_command_is_told_as_one_would_type_it(
    arguments: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", arguments)
    assert own_command() == command
