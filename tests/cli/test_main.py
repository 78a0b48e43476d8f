"""The frame of the command line: mounting, help, typos, errors and exit statuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest

from recnets.cli import main as cli
from recnets.errors import Misuse, RecNetsError


@pytest.fixture
def mount(monkeypatch):
    """Mount a made-up command `work` that does what the test gives."""

    def mounting(command):
        monkeypatch.setitem(sys.modules, "recnets.cli.work", types.SimpleNamespace(command=command))
        monkeypatch.setattr(cli, "mounted", lambda: {"work": cli.Entry("work", "work", "test")})

    return mounting


def raising(error):
    def command() -> None:
        raise error

    return command


def test_help_explains_itself(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in cli.mounted():
        assert f"\n  {name} " in text
    assert "recnet info recnet_60_1280" in text
    assert "write the paper's tables" in text


def test_no_arguments_is_wrong_use(capsys):
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: recnet COMMAND" in captured.err


def test_version(capsys):
    import recnets

    assert cli.main(["--version"]) == 0
    assert f"recnets {recnets.__version__} (torch " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typo", "message"),
    [
        ("lst", "unknown command 'lst'; did you mean 'list'?"),
        ("inf", "unknown command 'inf'; did you mean 'info'?"),
        ("--verbose", "unknown option '--verbose'"),
        ("qwertz", "unknown command 'qwertz' (`recnet --help` lists the commands)"),
    ],
)
def test_typos(typo, message, capsys):
    assert cli.main([typo]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_unknown_options_suggest_near_ones(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["list", "--jsn"])
    assert stopped.value.code == 2
    assert "--json" in capsys.readouterr().err


def test_every_mounted_command_has_help(capsys):
    for name in cli.mounted():
        with pytest.raises(SystemExit) as stopped:
            cli.main([name, "--help"])
        assert stopped.value.code == 0
        assert f"usage: recnet {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        "train --data digit",
        "train --model recnet_60_12800",
        "train --device gpu",
        "train --recipe nope",
        "bench nope",
        "eval nope",
        "info nope",
        "reproduce --table demo --set lr=-1",
        "reproduce --recipe nope",
        "reproduce --table demo --device gpu",
    ],
)
def test_unknown_names_and_values_are_wrong_use(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "flag", "text"),
    [
        ("reproduce", "--no-download", "Do not fetch a missing data set"),
        ("tables", "--no-figures", "Leave the figures out"),
        ("eval", "--no-per-class", "leave the table by class out"),
        ("eval", "--max-bad", "largest share of unreadable pictures"),
    ],
)
def test_help_says_what_a_flag_does(command, flag, text, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert re.search(rf"{flag}\b[^.]*{text}", shown)


def test_a_missing_module_is_not_mounted(monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, cli.Entry("fly", "no_such_module", "never")))
    assert "fly" not in cli.mounted()
    assert "list" in cli.mounted()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RecNetsError("no such folder 'x'; make it first"), 1, "no such folder 'x'; make it first"),
        (RecNetsError("two\n  lines and [bold]markup[/bold] \n"), 1, "two\n  lines and [bold]markup[/bold]"),
        (Misuse("unknown model 'x'"), 2, "unknown model 'x'"),
        (RecNetsError("long " * 60), 1, ("long " * 60).strip()),
        (FileNotFoundError(2, "No such file or directory", "weights"), 1, "weights: No such file or directory"),
    ],
)
def test_errors_are_clean(error, status, message, mount, capsys):
    mount(raising(error))
    assert cli.main(["work"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {message}\n"


def test_errors_of_our_code_are_clean_and_others_keep_their_traceback(mount, capsys):
    def ours() -> None:
        from recnets import CRC

        CRC(1, 1, 0)

    def theirs() -> None:
        int("seven")  # raised in this file, which is not the package's

    mount(ours)
    assert cli.main(["work"]) == 2
    assert capsys.readouterr().err == "error: d must be at least 1, got 0\n"
    mount(theirs)
    with pytest.raises(ValueError, match="seven"):
        cli.main(["work"])


def test_traceback_on_request(mount, monkeypatch):
    monkeypatch.setenv("RECNETS_TRACEBACK", "1")
    mount(raising(RecNetsError("shown")))
    with pytest.raises(RecNetsError, match="shown"):
        cli.main(["work"])


def test_interruption(mount, capsys):
    mount(raising(KeyboardInterrupt()))
    assert cli.main(["work"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_functions_and_dataclasses(mount, capsys):
    def function(count: int = 1, loud: bool = False) -> int:
        print("function", count, loud)
        return 3

    @dataclass
    class Data:
        count: int = 1

        def run(self) -> None:
            print("data", self.count)

    mount(function)
    assert cli.main(["work", "--count", "7", "--loud"]) == 3
    mount(Data)
    assert cli.main(["work", "--count", "5"]) == 0
    assert capsys.readouterr().out == "function 7 True\ndata 5\n"


def test_parsing_does_not_work_yet(mount):
    done = []
    mount(lambda: done.append(1))
    work = cli.parse(["work"])
    assert not done
    work()
    assert done


@pytest.mark.slow
def test_a_closed_pipe_is_silent():
    shell = f"{sys.executable} -m recnets list recnet_60_480 --json | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[\n"
    assert done.stderr == ""


@pytest.mark.slow
def test_a_closed_pipe_of_a_table_is_silent():
    shell = f"{sys.executable} -m recnets list | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (cli.BROKEN_PIPE, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8:strict"])
def test_what_a_stream_cannot_show_is_a_question_mark(encoding):
    name = os.fsdecode(b"caf\xe9 \xe2\x80\xa6.png")  # as from an old archive
    code = f"import sys; from recnets.cli.main import main; main(['--help']); print({name!r})"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"usage: recnet COMMAND [ARGUMENTS ")
    assert b"caf? " in done.stdout
