"""docs/deploy.md, block by block in order: what a reader would paste, in one folder and one namespace."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from recnets.cli.main import main

for _name, _extra in (("sklearn", "data"), ("PIL", "data"), ("onnx", "export"), ("onnxruntime", "export")):
    pytest.importorskip(_name, reason=f"the extra {_extra!r} is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
BLOCKS = re.findall(r"^```(python|bash)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_walk_from_pictures_to_a_file_for_the_device(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    commands = []
    executorch = importlib.util.find_spec("executorch") is not None
    for language, block in BLOCKS:
        if "executorch" in block and not executorch:
            continue
        if language == "python":
            exec(compile(block, str(PAGE), "exec"), namespace)
            continue
        for line in block.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line)
            assert program == "recnet"
            assert main(arguments) in (0, None), capsys.readouterr().err
            commands.append(arguments[0])
    assert commands == ["train", "predict", "squeeze", "export"] + ["export"] * executorch
    said = capsys.readouterr().out
    right, of = re.search(r"(\d+) of (\d+) right", said).groups()
    assert int(of) == 360
    assert int(right) > 320  # the digits are learnt, and the device's own preprocessing is the trainer's
    assert not executorch or said.count("'digit 3'") >= 6  # of eight
