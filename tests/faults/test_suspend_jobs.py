"""All processes of a job and its launcher are stopped for longer than the deadlines: Ctrl-Z, a suspending batch system,
a paused container. The job continues where it was, in each mode and on each transport."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import forked
import pytest
from launched import Launched
from pace import stretched

WORKER = Path(__file__).with_name("suspended_worker.py")
RANKS = 4
TIMEOUT_S, SILENCE_S = 3, 1
LINKS = {
    "local": {},
    "ucx": {"SORDINO_TRANSPORT": "ucx", "SORDINO_RANKS_PER_NODE": "2"},
    "mpi": {"SORDINO_RANKS_PER_NODE": "2"},
}
MODES = {
    "continue": ["--on-peer-lost", "continue"],
    "raise": ["--on-peer-lost", "raise"],
    "restart": ["--on-peer-lost", "raise", "--restarts", "2"],
}


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Job(Launched):
    """A job of `suspended_worker.py`."""

    def __init__(self, folder: Path, mode: str, link: str) -> None:
        self.folder = folder
        self.timeout_s = stretched(TIMEOUT_S)
        variables = {"SORDINO_TIMEOUT_S": self.timeout_s, "SORDINO_SILENCE_S": stretched(SILENCE_S), **LINKS[link]}
        words = [*MODES[mode], "-np", str(RANKS)]
        for name, value in variables.items():
            words += ["-x", f"{name}={value}"]
        super().__init__(folder, [*words, "--", *forked.python(), str(WORKER), str(folder), str(RANKS)])

    def steps(self) -> list[int]:
        files = [self.folder / f"steps.{rank}" for rank in range(RANKS)]
        return [file.stat().st_size if file.exists() else 0 for file in files]

    def take_steps(self, count: int) -> None:
        """Wait until each rank has taken `count` more steps."""
        before = self.steps()
        self.wait_for(lambda: all(now >= then + count for now, then in zip(self.steps(), before)))

    def stop(self, seconds: float) -> None:
        """Stop all processes of the job, the launcher first, and then let them continue."""
        processes = [self.front.pid, *(self.processes().keys() - {self.front.pid})]
        for pid in processes:
            self.send(pid, signal.SIGSTOP)
        self.wait_for(lambda: all(state_of(pid) in ("T", "") for pid in processes))
        time.sleep(seconds)
        for pid in processes:
            self.send(pid, signal.SIGCONT)


@pytest.mark.drill("a suspended job")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("link", LINKS)
def test_a_suspended_job_goes_on(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, link: str, mode: str
) -> None:
    if link == "mpi":
        request.getfixturevalue("by_mpirun")
    else:
        monkeypatch.setattr(Launched, "starter", "local")
    with Job(tmp_path, mode, link) as job:
        job.take_steps(3)
        pids = [(tmp_path / f"pid.{rank}").read_text() for rank in range(RANKS)]
        for _ in range(2):
            job.stop(job.timeout_s + 1)
            job.take_steps(10)
        (tmp_path / "enough").touch()
        assert job.ends() == 0, job.output
        assert pids == [(tmp_path / f"pid.{rank}").read_text() for rank in range(RANKS)], job.output
        assert job.output.count("ends well") == RANKS, job.output
        for word in ("lost", "stalled", "restart", "continues without"):
            assert word not in job.output, job.output
        job.leaves_nothing()
