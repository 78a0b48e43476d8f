"""Who trained which epochs of a run: a run that was stopped and resumed may have seen several commits and machines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any


def sessions_of(starts: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sessions whose work is in the run, in order.

    Args:
        starts: the sessions of a run's config.toml; "epoch" and "step" are what each found done.
        rows: the lines of metrics.jsonl.

    What a session trained beyond the checkpoint that the next one went on from is lost, and not counted here. An
    epoch that was cut in two stands with both. Speed and input share are medians over the epochs that a session
    began and ended, but for its first, which holds compilation and warm-up; None where there is no such epoch.
    """
    begins = [(int(start["epoch"]), int(start["step"])) for start in starts]
    found = []
    for i, (start, begin) in enumerate(zip(starts, begins, strict=True)):
        end = min([*begins[i + 1 :], (len(rows), 0)])
        if begin >= end:
            continue
        steady = rows[begin[0] + 1 : end[0]]
        found.append(
            {
                "first_epoch": begin[0] + 1,
                "from_step": begin[1],
                "last_epoch": end[0] + (end[1] > 0),
                "started": start["started"],
                "device": start["device"],
                "commit": start.get("commit"),
                "images_per_second": _median(steady, "images_per_second"),
                "input_share": _median(steady, "input_share"),
                "versions": dict(start["versions"]),
            }
        )
    return found


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return round(statistics.median(row[key] for row in rows), 6) if rows else None


def gaps(sessions: Sequence[Mapping[str, Any]], epochs: int) -> list[str]:
    """What is wrong with sessions that should make up `epochs` epochs, each going on where the one before ended."""
    found, done, step = [], 0, 0
    for i, session in enumerate(sessions):
        begin = (session["first_epoch"] - 1, session["from_step"])
        cut = begin[0] == done - 1 and begin[1] > step  # within the epoch that the one before had begun
        if not cut and begin != (done, 0):
            found.append(f"sessions[{i}]: epoch {done + 1} was next, it begins at {begin[0] + 1}, step {begin[1]}")
        done, step = session["last_epoch"], begin[1] if session["last_epoch"] == begin[0] + 1 else 0
    if done != epochs:
        found.append(f"sessions: expected to end with epoch {epochs}, got {done}")
    return found


def speed(sessions: Sequence[Mapping[str, Any]]) -> float | None:
    """Images a second in the session with the most epochs."""
    timed = [s for s in sessions if s["images_per_second"] is not None]
    longest = max(timed, key=lambda s: s["last_epoch"] - s["first_epoch"], default=None)
    return None if longest is None else longest["images_per_second"]


def short_commit(commit: str | None) -> str:
    """ "aa26e28ed", and "aa26e28ed+" for a tree with changes on top of it."""
    return "–" if commit is None else commit[:9] + ("+" if commit.endswith("+") else "")


def commits(sessions: Sequence[Mapping[str, Any]]) -> str:
    """ "28d55a188", or which commit trained which epochs: "aa26e28ed (1–51), 28d55a188 (52–200)"."""
    groups = [(commit, list(group)) for commit, group in groupby(sessions, key=lambda s: short_commit(s["commit"]))]
    if len(groups) == 1:
        return groups[0][0]
    spans = ((commit, group[0]["first_epoch"], group[-1]["last_epoch"]) for commit, group in groups)
    return ", ".join(
        f"{commit} ({first}–{last})" if first < last else f"{commit} ({first})" for commit, first, last in spans
    )
