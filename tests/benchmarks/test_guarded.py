"""Processes that are started again where one faults or hangs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from .scripts import FOLDER

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the benchmarks are in the repository only")

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from guarded import give_up, journal, supervise
known = journal()
if known is None:
    sys.exit(supervise(__file__, 5.0))
Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
for name in sys.argv[2:]:
    if name in known.ended or name in known.lost:
        continue
    if name == "nowhere":
        time.sleep(600)
    known.begin(name)
    if name == "hang":
        time.sleep(600)
    if name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "error":
        1 / 0
    known.end(name, "bad" if name == "fault" else "good")
    if name == "fault":
        give_up()
print(known.ended, sorted(known.lost))
known.end("all", True)
"""


@pytest.fixture
def start(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(*names: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), str(FOLDER), *names]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


@pytest.mark.slow
def test_what_a_process_was_at_when_it_ended_is_left_out_by_the_next(start):
    out, errors = (process := start("a", "fault", "b", "hang", "c", "die", "d")).communicate(timeout=60)
    assert process.returncode == 0, errors
    good = dict.fromkeys("abcd", "good")
    assert out.strip() == f"{ {'a': 'good', 'fault': 'bad'} | good } ['die', 'hang']"
    assert errors.splitlines() == [
        "the device is of no use after a fault: a new process goes on",
        "hang: the process hung for 5 s; a new one goes on without it",
        "die: the process was ended by signal 9; a new one goes on without it",
    ]


@pytest.mark.slow
def test_the_last_that_was_begun_is_named_and_a_process_that_begins_nothing_is_not_started_again(start):
    process = start("die", "a", "nowhere")
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert errors.splitlines() == [
        "die: the process was ended by signal 9; a new one goes on without it",
        "the process hung for 5 s where nothing new was begun: that is the end",
    ]


def test_an_error_that_is_no_fault_ends_it(start):
    process = start("a", "error", "b")
    assert "ZeroDivisionError" in process.communicate(timeout=60)[1]
    assert process.returncode == 1


@pytest.mark.slow
def test_the_process_does_not_outlive_the_one_that_waits_for_it(start, tmp_path):
    process, pid = start("hang"), tmp_path / "script.pid"
    while process.poll() is None and not (pid.exists() and pid.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_journal_tells_what_ended_from_what_was_lost(script, tmp_path):
    guarded = script("guarded")
    path = tmp_path / "journal.jsonl"
    first = guarded.Journal(path)
    first.begin("a")
    first.end("a", {"us": 1.5})
    first.end("all", [])
    first.begin("d")
    first.begin("b")
    second = guarded.Journal(path)
    assert (second.ended, second.lost) == ({"a": {"us": 1.5}, "all": []}, ["d", "b"])
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["a", "a", "all", "d", "b"]
    forgetful = guarded.Journal()
    forgetful.begin("a")
    forgetful.end("a", 1)
    assert (forgetful.ended, forgetful.lost) == ({"a": 1}, [])
