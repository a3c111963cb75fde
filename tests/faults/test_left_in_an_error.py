"""`shutdown()` while an error is handled: the other ranks and the launcher learn of the error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks.commands import SORDINO
from pace import HANG_S

from sordino.launcher.outcomes import Outcome, Outcomes

# The others end at once. Rank 1 takes some time, as if it wrote a checkpoint in another `finally:`.
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
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*SORDINO, "run", "-np", "3", "--", sys.executable, str(script), str(seconds)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=os.environ,
    )
    assert done.returncode == 1
    for rank in (0, 2):
        assert "rank 1, which has shut down because of ValueError: no such column: age" in done.stderr, rank
    last = done.stderr.splitlines()[-1]
    assert "rank 1 ended with status 1 and was the first to fail" in last, done.stderr


def test_a_rank_whose_own_error_ends_it_is_the_first() -> None:
    told = Outcomes(4)
    told.hear(3, "fails")  # it has handled the error, and ends well
    told.note(3, 0, 0.5)
    told.hear(1, "fails")
    told.hear(2, "fails")
    for rank, code in ((0, 1), (2, 3), (1, -15)):
        told.note(rank, code, float(rank))
    assert told.judge(0) == (1, "rank 1 ended with status 1 and was the first to fail; see its error above")
    assert told.first_of([Outcome(0.0, 0, 7)]).status == 7


def test_the_order_of_errors_is_that_of_their_links(tmp_path: Path) -> None:
    """Errors are in the order of their links, not of the folder or the ranks."""
    told = Outcomes(3, tmp_path)
    for moment, rank in enumerate((2, 0, 1)):
        link = tmp_path / f"fails.{rank}"
        link.symlink_to(str(os.getpid()))
        os.utime(link, ns=(moment, moment), follow_symlinks=False)
    failed = [Outcome(float(rank), rank, 1) for rank in range(3)]
    assert told.first_of(failed).rank == 2
