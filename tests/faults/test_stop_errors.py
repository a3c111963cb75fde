"""A rank raises, gives a wrong argument, or exits while the others continue. They get its error, the job ends with its
status, and ranks that can continue without it do so."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import forked
import pytest
import torch
from crew import PATIENCE_S, MakeCrew, Member, metric
from launched import Launched
from surviving import CONTINUE, Job, Note, check_survivors, tell_times

import sordino.torch as hvd
from sordino.errors import SordinoError, UsageError
from sordino.runtime.context import use

MEETING = str(Path(__file__).with_name("meeting_worker.py"))


@pytest.mark.drill("a rank that raises or exits")
def test_ranks_that_end_by_themselves(starter: str, tmp_path: Path, note_time: Note) -> None:
    ways = {1: "raise", 2: "exit", 4: "_exit"}
    faults = [
        {"victim": victim, "step": 4 + 3 * turn, "when": "between", "what": what}
        for turn, (victim, what) in enumerate(ways.items())
    ]
    with Job(tmp_path, 5, {"faults": faults}) as running:
        left = check_survivors(running.finish(), set(ways), equal=True)
        for victim, what in ways.items():
            tell_times(running, left, {victim}, note_time, f"a rank's {what}")
        assert "ValueError: boom of the victim" in running.output


@pytest.mark.drill("gone before all have met")
@pytest.mark.parametrize(("how", "status"), [("sys.exit(0)", 1), ("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_a_rank_that_leaves_before_it_meets_the_others_fails_the_job(
    starter: str, tmp_path: Path, how: str, status: int
) -> None:
    program = [*forked.python(), MEETING, how]
    with Launched(tmp_path, ["-np", "2", *CONTINUE, "--", *program]) as job:
        assert job.ends() == status, job.output
        job.leaves_nothing()
        # If the status is not 0, mpirun itself ends the other ranks.
        assert ("before all ranks had met, and" in job.output) == (starter == "mpi" and how == "sys.exit(0)")
        assert ("sordino.errors.PeerLost: rank 1 ended before all ranks had met" in job.output) == (starter == "local")


# The other ranks end at once. Rank 1 takes some time, as if it wrote a checkpoint in another `finally:`.
SCRIPT = """
import sys, time, torch
import sordino.torch as hvd
hvd.init()
try:
    try:
        hvd.allreduce(torch.ones(3))
        if hvd.rank() == 1:
            raise ValueError("no such column: age")
        hvd.allreduce(torch.ones(3))
    finally:
        late = hvd.rank() == 1
        hvd.shutdown()
        time.sleep(float(sys.argv[1]) if late else 0)
finally:
    print("left", flush=True)
"""


@pytest.mark.drill("an error that shutdown() has seen")
@pytest.mark.parametrize("seconds", [0, 20])
def test_the_error_is_told_and_its_rank_is_blamed(seconds: int, tmp_path: Path) -> None:
    with Launched(tmp_path, ["-np", "3", "--", *forked.python(), "-c", SCRIPT, str(seconds)]) as job:
        assert job.ends() == 1, job.output
        for rank in (0, 2):
            assert "rank 1, which has shut down because of ValueError: no such column: age" in job.output, rank
        last = job.output.splitlines()[-1]
        assert "rank 1 ended with status 1 and was the first to fail" in last, job.output


def test_blocking_operations_of_two_threads_are_refused(crew_of: MakeCrew) -> None:
    """After a loss, ranks could not tell which of the two operations they have completed."""
    all_refused = threading.Barrier(4)  # until then the others wait for the last rank, in the middle of an operation

    def work(member: Member) -> str | None:
        if member.identity == 3:
            all_refused.wait(PATIENCE_S)
            metric(member)
            return None
        refusals: list[str] = []

        def other() -> None:
            with use(member.context):
                while not member.context.world.names_in_flight():
                    time.sleep(0.001)
                try:
                    metric(member)
                except UsageError as error:
                    refusals.append(str(error))
                all_refused.wait(PATIENCE_S)

        beside = threading.Thread(target=other)
        beside.start()
        metric(member)
        beside.join()
        return refusals[0] if refusals else None

    answers = crew_of(4, per_node=2).all(work)
    assert all("from one thread" in (answers[identity] or "") for identity in range(3))


def test_a_local_error_can_be_mended_and_tried_again(crew_of: MakeCrew) -> None:
    """A rank that gave a wrong argument has not taken part. It tries again while the others wait."""

    def work(member: Member) -> float:
        if member.identity == 1:
            with pytest.raises(UsageError, match="root_rank"):
                hvd.broadcast_parameters({"w": torch.zeros(2)}, root_rank=9)
            with pytest.raises(SordinoError):
                hvd.allreduce(torch.zeros(2, dtype=torch.complex64))
        value = torch.full((2,), float(member.identity))
        hvd.broadcast_parameters({"w": value}, root_rank=2)
        return float(value[0])

    crew = crew_of(4, per_node=2)
    assert set(crew.all(work).values()) == {2.0}
    crew.network.kill(0)
    assert set(crew.all(work).values()) == {2.0}
