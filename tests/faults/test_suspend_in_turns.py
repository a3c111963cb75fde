"""A rank is stopped (SIGSTOP) in a turn, in which ranks repeat an operation without a negotiation, or in the data phase
after it. If it continues soon, no rank notices. If not, the others raise `Timeout` with its rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from pace import bound, stretched
from turns import TurnJob

from sordino._core import build_info

KINDS = ["allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "barrier"]
STRIKE = 6
SMALL, LARGE = 2, 200_000  # rows of two float32: done in one shot, and by slots or in place
TIMEOUT_S = 1.5
# A leader declines the turn for a rank of its node that has been silent for half a second; so some stops take 0.7 s.
PATHS = [
    pytest.param(way, when, rows, victim, per_node, after_s, marks=pytest.mark.drill(f"stopped in a turn: {path}"))
    for path, way, when, rows, victim, per_node, after_s in (
        ("one node", "blocking", "entered", SMALL, 1, 0, 0.02),
        ("one node", "asynchronous", "late", SMALL, 0, 0, 0.02),
        ("one node", "asynchronous", "entered", SMALL, 0, 0, 0.7),
        ("large", "asynchronous", "inside", LARGE, 1, 0, 0.02),
        ("large", "blocking", "late", LARGE, 2, 0, 0.7),
        ("large", "blocking", "inside", LARGE, 2, 2, 0.02),
        ("two nodes", "asynchronous", "entered", SMALL, 2, 2, 0.02),
        ("two nodes", "blocking", "late", SMALL, 1, 2, 0.7),
        ("two nodes", "blocking", "entered", SMALL, 3, 2, 0.02),
        ("two nodes", "asynchronous", "late", SMALL, 0, 2, 0.7),
    )
]


def skip_without_ucx(per_node: int) -> None:
    if per_node and not build_info()["ucx"]:
        pytest.skip("this build has no UCX")


@pytest.mark.parametrize(("way", "when", "rows", "victim", "per_node", "after_s"), PATHS)
def test_a_rank_that_is_stopped_in_turns_and_continues(
    tmp_path: Path, way: str, when: str, rows: int, victim: int, per_node: int, after_s: float
) -> None:
    skip_without_ucx(per_node)
    plan = {"kinds": KINDS, "way": way, "rows": rows, "victim": victim, "when": when, "what": "stop"}
    with TurnJob(tmp_path, 4 if per_node else 3, {**plan, "strikes": [STRIKE]}, per_node) as job:
        for _ in KINDS:
            job.wake(victim, after_s)
        for report in job.reports().values():
            assert report["ended"] == "well" and report["wrong"] == 0, (report, job.output)
            assert report["in_one_shot"] > 0 or rows == LARGE, report


@pytest.mark.parametrize(
    ("when", "rows", "victim", "per_node"),
    [
        pytest.param(*one, marks=pytest.mark.drill("stopped in a turn for too long"))
        for one in (("late", SMALL, 1, 0), ("entered", SMALL, 0, 0), ("inside", LARGE, 2, 0), ("late", SMALL, 2, 2))
    ],
)
def test_a_rank_that_is_stopped_in_a_turn_for_too_long(
    tmp_path: Path, when: str, rows: int, victim: int, per_node: int
) -> None:
    skip_without_ucx(per_node)
    timeout_s = stretched(TIMEOUT_S)
    plan = {"kinds": ["allreduce"], "rows": rows, "victim": victim, "when": when, "what": "stop", "strikes": [STRIKE]}
    with TurnJob(tmp_path, 4 if per_node else 3, plan, per_node, SORDINO_TIMEOUT_S=str(timeout_s)) as job:
        pid = job.wait_until_stopped(victim)
        others = {rank: job.wait_for(f"report.{rank}") for rank in range(job.ranks) if rank != victim}
        struck = job.read(f"fault.{victim}")
        os.kill(pid, signal.SIGCONT)
        reports = job.reports()
        for report in others.values():
            assert report["ended"] == "Timeout" and report["named"] == [victim], (report, job.output)
            assert report["at"] - struck["at"] < bound(0.25, timeout_s + 2), report
        assert reports[victim]["ended"] in ("PeerLost", "Timeout"), reports[victim]
        assert all(report["wrong"] == 0 for report in reports.values())


@pytest.mark.drill("shutdown() while another rank is stopped")
@pytest.mark.parametrize(("ranks", "per_node", "stopped"), [(2, 0, 0), (2, 0, 1), (3, 0, 1), (4, 2, 0), (4, 2, 3)])
def test_an_operation_that_some_have_entered_when_they_shut_down_fails_on_all(
    tmp_path: Path, ranks: int, per_node: int, stopped: int
) -> None:
    """The stopped rank comes to the operation after the others have left. Their entries must not count any more."""
    skip_without_ucx(per_node)
    plan = {"kinds": [], "what": "leave", "stopped": stopped}
    with TurnJob(tmp_path, ranks, plan, per_node) as job:
        pid = job.wait_until_stopped(stopped)
        (tmp_path / "stopped").touch()
        others = {rank: job.wait_for(f"report.{rank}") for rank in range(ranks) if rank != stopped}
        os.kill(pid, signal.SIGCONT)
        for rank, report in others.items():
            assert report["ended"] == "well" and report["value"] == rank + 1, (report, job.output)
        # The first one that leaves takes its entry back at once, and does not wait for the operation.
        assert min(report["shutdown_s"] for report in others.values()) < bound(0.02), others
        late = job.reports()[stopped]
        assert late["ended"] == "PeerLost" and late["named"][0] != stopped, (late, job.output)
