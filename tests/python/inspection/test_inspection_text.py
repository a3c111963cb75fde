"""The text of `sordino inspect`, made from the answers of ranks: which rank waits for which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sordino.errors import NotBuilt
from sordino.inspection.asking import processes
from sordino.inspection.text import described

PLACES = [["a", 10], ["a", 11], ["b", 12]]
STACK = [["train.py", 40, "evaluate", "wait()"]]


def answer(rank: int, *waits: list[Any], **more: Any) -> dict[str, Any]:
    world = {"job": "a:10", "rank": rank, "size": 3, "places": PLACES, "failed": False, "waits": list(waits)} | more
    thread = {"name": "MainThread", "stack": STACK}
    return {"pid": 10 + rank, "host": "a", "command": ["python", "train.py"], "worlds": [world], "threads": [thread]}


def test_the_coordinator_knows_who_is_late() -> None:
    """Rank 0 coordinates, and has not called the operation itself. Ranks that called it only know it is undecided."""
    undecided = ["undecided", "allreduce 'loss'", 2.0, [0]]
    lines = list(described([answer(1, undecided), answer(0, ["called", "allreduce 'loss'", 3.04, [0, 2]])]))
    assert lines[0] == "3 ranks of `python train.py`, 2 of them answer here"
    assert lines[1] == "  allreduce 'loss', 3.0 s: rank 1 waits for ranks 0, 2"
    assert lines[2] == "  rank 0 (process 10 on a):"
    assert lines[3:5] == ['    File "train.py", line 40, in evaluate', "      wait()"]
    assert lines[5] == "  rank 2 (process 12 on b) does not answer here: run `sordino inspect` on its host"
    assert len(lines) == 6


def test_a_coordinator_on_another_host() -> None:
    lines = list(described([answer(1, ["undecided", "allreduce 'loss'", 2.0, [2]])]))
    told = "  allreduce 'loss', 2.0 s: rank 1 waits, and rank 2, which coordinates it, knows for which ranks"
    assert lines[1:] == [told]


def test_ranks_that_wait_for_each_other() -> None:
    """Each rank is late for the other's operation, so both stacks matter."""
    waits = [["message", "receive from 1", 1.0, [1]], ["message", "receive from 0", 2.0, [0]]]
    lines = list(described([answer(rank, wait) for rank, wait in enumerate(waits)]))
    assert lines[1:3] == [
        "  receive from 0, 2.0 s: rank 1 waits for rank 0",
        "  receive from 1, 1.0 s: rank 0 waits for rank 1",
    ]
    assert sum("process" in line for line in lines) == 2


def test_late_ranks_that_do_not_answer() -> None:
    silent = {"pid": 11, "silent": "is stopped"}
    ended = {"pid": 99, "silent": "has ended"}
    lines = list(described([answer(0, ["running", "broadcast 'w'", 9.0, [1]]), silent, ended]))
    assert lines[1:] == [
        "  broadcast 'w', 9.0 s: rank 0 waits for rank 1",
        "  rank 1 (process 11 on a) is stopped",
        "process 99 has ended",
    ]


def test_jobs_are_told_apart_and_all_threads_shown_if_asked() -> None:
    other = answer(0, job="a:77", size=1, places=[["a", 77]])
    lines = list(described([answer(0), other], all_threads=True))
    assert sum(line.startswith(("3 ranks", "1 ranks")) for line in lines) == 2
    assert lines.count("    thread MainThread") == 2 and lines.count("  no rank waits for another") == 2


def test_worlds_that_have_failed_or_are_not_polled() -> None:
    unpolled = answer(1)
    unpolled["worlds"][0]["waits"] = None
    lines = list(described([answer(0, failed=True), unpolled]))
    assert "  rank 0: its world has failed" in lines
    assert "  rank 1: no thread polls for messages, so its operations do not move" in lines


def test_ranks_are_found_by_their_addresses(tmp_path: Path) -> None:
    lines = ["Num RefCount Protocol Flags Type St Inode Path"]
    for name in ("@sordino-inspect/7/12", "@sordino-inspect/7/x", "/run/sordino-inspect/7/13", "@other/7/14", ""):
        lines.append(f"0000000000000000: 00000002 00000000 00010000 0001 01 {len(lines)} {name}")
    (tmp_path / "unix").write_text("\n".join(lines))
    assert processes(tmp_path / "unix") == [(7, 12)]
    with pytest.raises(NotBuilt, match="which cannot be read here: No such file"):
        processes(tmp_path / "none")
