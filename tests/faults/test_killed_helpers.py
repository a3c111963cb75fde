"""Ranks without a model that are killed under `sordino run`: a communicator, a parameter server."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from launched import Launched
from pace import bound

WORKER = Path(__file__).parents[1] / "mp" / "helper_worker.py"
ENDS_WITHIN_S = 0.25  # on an idle machine


@pytest.mark.drill("a helper killed")
@pytest.mark.parametrize(("what", "helpers"), [("communicator", "groups of 2"), ("server", "1 servers")])
def test_the_job_ends_with_it(
    starter: str, tmp_path: Path, note_time: Callable[[str, float], None], what: str, helpers: str
) -> None:
    """The workers cannot continue without the helper, so the job fails with the status of the kill."""
    program = [*forked.python(), str(WORKER), str(tmp_path), helpers, "kill helper", "none"]
    with Launched(tmp_path, ["-np", "3", "--", *program]) as job:
        job.wait_for(lambda: all((tmp_path / f"trained.{rank}").exists() for rank in range(2)))
        struck = time.monotonic()
        job.send(job.rank(2), signal.SIGKILL)
        # mpirun returns the status of the first end that it sees, and the workers raise within milliseconds.
        assert job.ends() in {128 + signal.SIGKILL, *([1] if starter == "mpi" else [])}
        took = time.monotonic() - struck
        note_time(f"kill -9 of a {what}, until the job has ended", took)
        assert took < bound(ENDS_WITHIN_S), f"{took:.2f} s"
        job.leaves_nothing()
