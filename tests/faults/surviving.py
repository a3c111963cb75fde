"""Jobs of `surviving_worker.py`: with `sordino run` on this machine (`Job`), and on four emulated hosts (`Hosts`)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
from launched import Launched, eventually
from pace import HANG_S, bound, stretched

from cluster import Cluster

WORKER = Path(__file__).with_name("surviving_worker.py")
CONTINUE = ["--on-peer-lost", "continue"]
# Times on an idle machine, in seconds; the measured times are printed.
ENDS_WITHIN_S = 0.5  # the job, after its last rank's report
ENDS_ANYWAY_S = 2  # in addition, if mpirun stays
GOES_ON_WITHIN_S = 0.25  # after a death that is certain
SILENCE_S = 2
SILENCE_OF_HOSTS_S = 3
PLAN_OF_HOSTS = {"steps": 60, "pause_s": 0.02, "wait_for": "go"}

Note = Callable[[str, float], None]


class Job(Launched):
    """A job on this machine, and the files of its ranks.

    Args:
        folder: folder of the job's files.
        ranks: number of ranks.
        plan: plan of the worker.
        variables: environment variables of the ranks.
    """

    def __init__(self, folder: Path, ranks: int, plan: dict[str, Any], **variables: str) -> None:
        self.folder, self.ranks = folder, ranks
        words = [*CONTINUE, "-np", str(ranks)]
        self.silence_s = stretched(SILENCE_S)  # a busy machine must not count as silent
        for name, value in {"SORDINO_SILENCE_S": str(self.silence_s), "SORDINO_TIMEOUT_S": "60", **variables}.items():
            words += ["-x", f"{name}={value}"]
        super().__init__(folder, [*words, "--", *forked.python(), str(WORKER), str(folder), json.dumps(plan)])

    def read(self, name: str) -> Any:
        return read(self.folder / name)

    def wait_for_files(self, *names: str) -> None:
        self.wait_for(lambda: all((self.folder / name).exists() for name in names))

    def finish(self, status: int = 0, within: float = HANG_S) -> list[dict[str, Any] | None]:
        """Wait for the end; return the reports of all ranks, None for a rank without a report."""
        ended = self.ends(within)
        found = time.time()
        assert ended == status, f"status {ended}\n{self.output}"
        reports = [self.read(f"report.{rank}") for rank in range(self.ranks)]
        after = found - max((report["at"] for report in reports if report), default=found)
        assert after < bound(ENDS_WITHIN_S, ENDS_ANYWAY_S), f"ended {after:.1f} s after its last rank"
        self.leaves_nothing()
        return reports

    def pid(self, rank: int) -> int:
        return int(self.read(f"pid.{rank}")["pid"])


class Hosts:
    """Four hosts with one training rank each, and the files of the ranks."""

    def __init__(self, folder: Path, cluster: Cluster, plan: dict[str, Any], silence_s: float, way: str) -> None:
        self.folder, self.cluster, self.plan, self.silence_s, self.way = folder, cluster, plan, silence_s, way
        self.output = ""
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        command = [*forked.python(), str(WORKER), str(self.folder), json.dumps(self.plan)]
        env = {"SORDINO_SILENCE_S": str(self.silence_s), "SORDINO_TIMEOUT_S": "60", **forked.environment()}
        if self.way == "ucx":
            done = self.cluster.processes(4, command, env, HANG_S)
        else:
            done = self.cluster.run(4, command, env, timeout=HANG_S, options=["--with-ft", "ulfm"])
        self.output = done.stdout + done.stderr

    def read(self, name: str) -> Any:
        return read(self.folder / name)

    def wait_for(self, *names: str, seconds: float = HANG_S) -> None:
        there = eventually(lambda: all((self.folder / name).exists() for name in names), seconds)
        assert there, f"waited for {names}, found {sorted(path.name for path in self.folder.iterdir())}\n{self.output}"

    def resizes(self, lost: int) -> Iterator[dict[str, Any]]:
        """Wait until the other ranks continue without rank `lost`; yield the change of size on each."""
        left = [rank for rank in range(4) if rank != lost]
        self.wait_for(*(f"resized.{rank}" for rank in left))
        for rank in left:
            [resize] = self.read(f"resized.{rank}")
            assert (resize["before"], resize["now"]) == (4, 3)
            yield resize

    def finish_without(self, lost: int) -> None:
        """Let the other ranks take their last steps; check that they end together."""
        left = [rank for rank in range(4) if rank != lost]
        (self.folder / "go").touch()
        self.wait_for(*(f"report.{rank}" for rank in left))
        for rank in left:
            report = self.read(f"report.{rank}")
            assert report["ended"] == "well" and report["members"] == left, report


@contextmanager
def hosts(folder: Path, plan: dict[str, Any], way: str, silence_s: float = SILENCE_OF_HOSTS_S) -> Iterator[Hosts]:
    """Run four hosts. The silence is stretched, so that a busy machine does not count as silent."""
    with Cluster(hosts=4, mbps=1000) as cluster:
        running = Hosts(folder, cluster, plan, stretched(silence_s), way)
        try:
            yield running
        finally:
            (folder / "go").touch()
            # Processes that wait for a host that is cut off, including the launcher, end with the cluster.
            running.thread.join(2)
            cluster.close()
            running.thread.join(20)


def read(path: Path) -> Any:
    """Return the content of a JSON file, None if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else None


def check_survivors(reports: list[dict[str, Any] | None], lost: set[int], equal: bool) -> list[dict[str, Any]]:
    """Check that the remaining ranks reached the end together, with the right members and values."""
    survivors = [rank for rank in range(len(reports)) if rank not in lost]
    found = {rank: reports[rank] for rank in survivors}
    assert all(report is not None for report in found.values()), f"{found}"
    left = [report for report in found.values() if report is not None]
    for place, report in enumerate(left):
        assert report["ended"] == "well", report
        assert report["members"] == survivors and report["rank"] == place, report
        assert report["finite"] and report["size"] == len(survivors), report
        assert report["loss"] < report["first_loss"], report
    if equal:
        assert len({report["sha256"] for report in left}) == 1, "survivors' models differ"
    return left


def tell_times(
    job: Job, reports: list[dict[str, Any]], lost: set[int], note: Note, name: str, certain_s: float = 0
) -> None:
    """Note and check the time from each loss until the remaining ranks had met again, beyond the `certain_s` seconds
    that must pass."""
    limit = bound(GOES_ON_WITHIN_S, certain_s)
    for victim in lost:
        fault = job.read(f"fault.{victim}")
        if fault is None:
            continue
        for report in reports:
            after = [resize["at"] - fault["at"] for resize in report["resized"] if resize["at"] > fault["at"]]
            assert after, f"no rank noticed that rank {victim} was lost"
            note(name, min(after))
            assert min(after) < limit, f"it took {min(after):.2f} s to go on without rank {victim}"


def kill(victim: int, step: int, when: str, **more: Any) -> dict[str, Any]:
    return {"victim": victim, "step": step, "when": when, "what": "kill", **more}
