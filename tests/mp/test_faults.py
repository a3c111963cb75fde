"""Ranks that die, leave, raise or stand still in real jobs: the remaining ranks notice it, and nothing is left
behind."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest
from launched import eventually
from pace import HANG_S, bound, stretched

from sordino.launcher import mpi

WORKER = Path(__file__).with_name("fault_worker.py")
RANKS = 3
TIMEOUT_S = 3
HEARS_WITHIN_S = 0.25  # a survivor, on an idle machine
SHM = Path("/dev/shm")
OF_OTHERS = ("sm_segment.", "sordino-run-")  # prefixes of files that other jobs may have


@dataclass(frozen=True)
class Fault:
    what: str
    when: str
    victim: int
    ulfm: bool = False
    shared: bool = True
    per_node: int = 0

    def __str__(self) -> str:
        tail = (
            ("-ulfm" if self.ulfm else "")
            + ("" if self.shared else "-unshared")
            + f"-x{self.per_node}" * (self.per_node > 0)
        )
        return f"{self.what} rank {self.victim} {self.when}{tail}".replace(" ", "_")


class Running:
    """A running job, and the files of its ranks in their folder."""

    def __init__(self, launcher: mpi.Launcher, folder: Path, fault: Fault) -> None:
        self.timeout_s = stretched(TIMEOUT_S)  # a busy machine must not be taken for a rank that stands still
        words = [str(WORKER), str(folder), fault.what, fault.when, str(fault.victim)]
        extra = ["--with-ft", "ulfm"] if fault.ulfm else []
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SORDINO_", "HOROVOD_"))},
            "SORDINO_TIMEOUT_S": str(self.timeout_s),
            "SORDINO_STALL_WARN_S": str(self.timeout_s / 3),
            "SORDINO_SHARED_MEMORY": str(int(fault.shared)),
            "SORDINO_RANKS_PER_NODE": str(fault.per_node),
            # A killed mpirun leaves its session files, which have its process number as their name. Another mpirun with
            # this number would not start.
            "PRTE_MCA_prte_local_tmpdir_base": str(folder),
        }
        self.folder, self.names_before = folder, set(os.listdir(SHM))
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            self.launcher = subprocess.Popen(
                mpi.command_line(launcher, mpi.Job(RANKS, [*forked.python(), *words], extra=extra)),
                stdout=out, stderr=err, env=environment, start_new_session=True,
            )  # fmt: skip

    def read(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def wait_for(self, names: list[str], seconds: float = HANG_S) -> None:
        everything = lambda: all((self.folder / name).exists() for name in names)  # noqa: E731
        found = eventually(lambda: everything() or self.launcher.poll() is not None, seconds) and everything()
        assert found, f"waited for {names}, found {sorted(os.listdir(self.folder))}\n{self.output()}"

    def output(self) -> str:
        return "".join((self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))

    def pid(self, rank: int) -> int:
        content = self.read(f"pid.{rank}")
        assert content is not None
        return int(content["pid"])

    def lives(self, rank: int) -> bool:
        """Return whether the process of that rank is running (and is not another process with the same number)."""
        try:
            process = Path("/proc", str(self.pid(rank)))
            mine = str(self.folder).encode() in (process / "cmdline").read_bytes()
            return mine and (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def send(self, rank: int, number: signal.Signals) -> None:
        if self.lives(rank):
            os.kill(self.pid(rank), number)

    def new_names(self) -> set[str]:
        """Return this job's files in /dev/shm. Files of other jobs may appear and disappear meanwhile."""
        mapped = [self.read(f"mapped.{rank}") for rank in range(RANKS)]
        own = {name.rpartition(".")[0] for names in mapped if names for name in names["names"]}
        new = set(os.listdir(SHM)) - self.names_before
        return {name for name in new if name.rpartition(".")[0] in own or not name.startswith(OF_OTHERS)}

    def leaves_nothing(self) -> None:
        gone = eventually(lambda: not any(map(self.lives, range(RANKS))), HANG_S)
        assert gone, f"these ranks are still there: {[r for r in range(RANKS) if self.lives(r)]}\n{self.output()}"
        assert eventually(lambda: not self.new_names(), HANG_S), f"left in /dev/shm: {self.new_names()}"

    def end(self) -> None:
        """End the job by force, after a failure of the test."""
        if self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()
        for rank in range(RANKS):
            if (self.folder / f"pid.{rank}").exists():
                self.send(rank, signal.SIGKILL)


@pytest.fixture(scope="module")
def openmpi(launcher: mpi.Launcher) -> mpi.Launcher:
    if launcher.family != "openmpi":
        pytest.skip("written for Open MPI's launcher")
    return launcher


Start = Callable[[Fault], Running]


@pytest.fixture
def start(openmpi: mpi.Launcher, tmp_path: Path) -> Iterator[Start]:
    started: list[Running] = []

    def start_one(fault: Fault) -> Running:
        started.append(Running(openmpi, tmp_path, fault))
        return started[-1]

    yield start_one
    for job in started:
        job.end()


def survivors(fault: Fault) -> list[int]:
    return [rank for rank in range(RANKS) if rank != fault.victim]


def until_over(job: Running, fault: Fault) -> dict[str, Any]:
    """Wait for the fault and the job's end; return what the victim wrote at the fault."""
    job.wait_for([f"fault.{fault.victim}"])
    struck = job.read(f"fault.{fault.victim}")
    assert struck is not None
    try:
        job.launcher.wait(HANG_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still there {HANG_S} s after the fault: {sorted(os.listdir(job.folder))}\n{job.output()}")
    job.leaves_nothing()
    return struck


def reports(job: Running, fault: Fault, all_must: bool) -> list[dict[str, Any]]:
    """Return the survivors' reports. If a rank's end ends the job, the launcher may have killed survivors before."""
    found = {rank: job.read(f"report.{rank}") for rank in survivors(fault)}
    if all_must:
        silent = [rank for rank, report in found.items() if report is None or "shut_down_at" not in report]
        assert not silent, f"ranks {silent} did not report\n{job.output()}"
    return [report for report in found.values() if report is not None]


def assert_settled(report: dict[str, Any]) -> None:
    """Assert that every later operation failed with the same kind of error, and that shutdown worked."""
    if "later" in report:
        assert report["later"] == [report["kind"]] * 3, report
        assert report["initialized"] is False
        assert report["shut_down_at"] - report["at"] < bound(HEARS_WITHIN_S)


LOST = [
    Fault("kill", "between", 0),
    Fault("kill", "big", 1),
    Fault("kill", "between", 1, ulfm=True),
    Fault("kill", "big", 0, ulfm=True),
    Fault("kill", "backward", 1, ulfm=True),
    Fault("kill", "between", 1, ulfm=True, per_node=2),
    Fault("kill", "between", 2, ulfm=True, per_node=2),
    Fault("exit 0", "between", 1, ulfm=True, per_node=2),
    Fault("_exit", "between", 1),
    Fault("exit 0", "between", 1),
    Fault("exit 0", "between", 0, ulfm=True),
    Fault("exit 3", "big", 0, shared=False),
    Fault("raise", "between", 1, shared=False),
    Fault("raise", "backward", 0, ulfm=True),
    Fault("kill", "messages", 1),
    Fault("kill", "large messages", 0, ulfm=True, per_node=1),
    Fault("raise", "messages", 2, shared=False),
    Fault("exit 0", "large messages", 1),
    Fault("kill", "exchange", 1, ulfm=True),
    Fault("kill", "exchange", 0, ulfm=True, shared=False),
    Fault("kill", "push", 1, ulfm=True),
    Fault("kill", "shards", 1, ulfm=True),
    Fault("kill", "shards", 2, ulfm=True, shared=False),
    Fault("kill", "layers", 1, ulfm=True),
    Fault("kill", "skip", 1, ulfm=True),
    Fault("kill", "serve", 1, ulfm=True),
    Fault("kill", "serve", 2, ulfm=True, shared=False),
]


@pytest.mark.parametrize(
    "fault", [pytest.param(one, id=str(one), marks=pytest.mark.drill(f"raise: lost {one.when}")) for one in LOST]
)
def test_a_lost_rank_is_named(start: Start, note_time: Callable[[str, float], None], fault: Fault) -> None:
    job = start(fault)
    struck = until_over(job, fault)
    if fault.when in ("big", "exchange"):
        assert struck["under_way"], "the operation was over before the fault; make it bigger"
    for report in reports(job, fault, all_must=fault.ulfm or fault.what == "exit 0"):
        assert report["kind"] == "PeerLost", report
        assert report["ranks"] == [fault.victim], report
        assert f"rank {fault.victim}" in report["text"]
        note_time(f"a rank's {fault.what}, until the others raise", report["at"] - struck["at"])
        assert report["at"] - struck["at"] < bound(HEARS_WITHIN_S), report
        if fault.what == "raise":
            assert "ValueError: boom of the victim" in report["text"]
        if fault.when in ("exchange", "push"):  # each element is from before the exchange or from after it
            assert report["other_values"] == 0 and all(map(math.isfinite, report["values"])), report
        assert_settled(report)
    if fault.what == "raise":
        assert "ValueError: boom of the victim" in (job.folder / "stderr").read_text(), "no traceback"
    if fault.what in ("raise", "exit 3") and not fault.ulfm:  # with ULFM, Open MPI counts such a job as a success
        assert job.launcher.returncode != 0
    if fault.what == "exit 0":
        assert job.launcher.returncode == 0, job.output()


STOPPED = [
    Fault("stop", "between", 1),
    Fault("stop", "between", 0, shared=False),
    Fault("stop", "between", 1, per_node=2),
    Fault("stop", "between", 2, per_node=2),
    Fault("stop", "big", 1, ulfm=True),
]


@pytest.mark.drill("raise: stopped")
@pytest.mark.parametrize("fault", STOPPED, ids=str)
def test_a_rank_that_stands_still_is_timed_out(start: Start, fault: Fault) -> None:
    job = start(fault)
    job.wait_for([f"fault.{fault.victim}"])
    job.wait_for([f"report.{rank}" for rank in survivors(fault)])
    left = eventually(lambda: not any(map(job.lives, survivors(fault))), HANG_S)
    assert left, f"survivors do not end by themselves\n{job.output()}"
    job.send(fault.victim, signal.SIGKILL if fault.ulfm else signal.SIGCONT)
    struck = until_over(job, fault)
    for report in reports(job, fault, all_must=True):
        assert report["kind"] == "Timeout", report
        assert report["operation"] == f"allreduce.{fault.when}", report
        assert report["missing"] == [fault.victim], report
        assert f"'allreduce.{fault.when}'" in report["text"] and str(fault.victim) in report["text"]
        # Ranks may have begun to wait slightly before the victim reported that it stops.
        assert job.timeout_s / 2 <= report["at"] - struck["at"] < bound(HEARS_WITHIN_S, job.timeout_s + 2), report
        assert_settled(report)
    if fault.when == "between":  # if the operation has begun, only the deadline counts
        lines = (job.folder / "stderr").read_text().splitlines()
        warnings = [line for line in lines if line.startswith("sordino: stalled: ")]
        assert warnings, job.output()
        for line in warnings:
            assert "'allreduce.between'" in line and re.search(rf"ranks? {fault.victim}\b", line), line


@pytest.mark.drill("everything killed")
def test_killing_everything_leaves_nothing(start: Start) -> None:
    """The job has no name in /dev/shm after init(), so a kill cannot leave one."""
    job = start(Fault("nothing", "for ever", 0))
    job.wait_for([f"fault.{rank}" for rank in range(RANKS)])
    assert eventually(lambda: not job.new_names(), HANG_S), f"a running job has names in /dev/shm: {job.new_names()}"
    job.launcher.kill()
    for rank in range(RANKS):
        assert job.lives(rank), job.output()
        job.send(rank, signal.SIGKILL)
    job.launcher.wait(HANG_S)
    job.leaves_nothing()
    left = Path(tempfile.gettempdir(), f"ompi.{job.launcher.pid}")
    assert not left.exists(), f"no mpirun that gets this number can start beside {left}"


BAD_VALUES = [
    ("SORDINO_TIMEOUT_S", "abc"),
    ("SORDINO_TIMEOUT_S", "0"),
    ("SORDINO_TIMEOUT_S", "nan"),
    ("SORDINO_STALL_WARN_S", "-1"),
    ("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon"),
    ("SORDINO_FUSION_BYTES", "64MB"),
    ("HOROVOD_FUSION_THRESHOLD", ""),
    ("SORDINO_CHUNK_BYTES", "12"),
    ("SORDINO_RANKS_PER_NODE", "-2"),
    ("SORDINO_SHARED_MEMORY", "yes"),
    ("SORDINO_SPIN_US", "1e99"),
    ("SORDINO_CPU_LEVEL", "avx1024"),
]
TRY_THEM = """
import json, os, sys
import sordino.torch as hvd
said = []
for name, value in json.loads(sys.argv[1]):
    os.environ[name] = value
    try:
        hvd.init()
        said.append("nothing")
        hvd.shutdown()
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    del os.environ[name]
hvd.init()
print(json.dumps(said))
"""


def test_wrong_environment_values_are_named() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SORDINO_", "HOROVOD_"))}
    done = subprocess.run(
        [sys.executable, "-c", TRY_THEM, json.dumps(BAD_VALUES)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=clean,
    )
    assert done.returncode == 0, done.stderr
    wrong = [
        (name, value, text)
        for (name, value), text in zip(BAD_VALUES, json.loads(done.stdout))
        if not text.startswith("UsageError: ") or name not in text or f"'{value}'" not in text
    ]
    assert not wrong, wrong
