"""Hosts that cannot reach each other: the majority continues, the others stop, and no two parts train on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import pytest
from launched import eventually
from pace import HANG_S, bound, stretched

from cluster import Cluster
from sordino._core import build_info

WORKER = Path(__file__).with_name("surviving_worker.py")
SILENCE_S = 3
GOES_ON_WITHIN_S = 0.25  # after the silence, on an idle machine


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
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def wait_for(self, *names: str, seconds: float = HANG_S) -> None:
        there = eventually(lambda: all((self.folder / name).exists() for name in names), seconds)
        assert there, f"waited for {names}, found {sorted(path.name for path in self.folder.iterdir())}\n{self.output}"


@contextmanager
def hosts(folder: Path, plan: dict[str, Any], way: str, silence_s: float = SILENCE_S) -> Iterator[Hosts]:
    """Run four hosts; the silence is stretched, so that a busy machine is not taken for a silent one."""
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


@pytest.fixture(params=["mpi", "ucx"])
def way(request: pytest.FixtureRequest, emulated_hosts: None) -> str:
    """The transport between the hosts."""
    if request.param == "ucx" and not build_info()["ucx"]:
        pytest.skip("this build has no UCX")
    return str(request.param)


PLAN = {"steps": 60, "pause_s": 0.02, "wait_for": "go"}


@pytest.mark.drill("one host cut off")
@pytest.mark.parametrize("algorithm", ["allreduce", "crossover"])
def test_three_go_on_without_one(
    way: str, tmp_path: Path, note_time: Callable[[str, float], None], algorithm: str
) -> None:
    with hosts(tmp_path, {**PLAN, "algorithm": algorithm}, way) as running:
        running.wait_for("step.0", "step.1", "step.2", "step.3")
        running.cluster.cut("node3")
        cut = time.time()
        running.wait_for("resized.0", "resized.1", "resized.2", "report.3")
        alone = running.read("report.3")
        assert alone["ended"] == "NoQuorum" and alone["finite"], alone
        for rank in range(3):
            [resize] = running.read(f"resized.{rank}")
            assert (resize["before"], resize["now"]) == (4, 3)
            note_time(f"one of four hosts cut off, {running.silence_s:g} s of silence", resize["at"] - cut)
            assert resize["at"] - cut < bound(GOES_ON_WITHIN_S, running.silence_s)
        (tmp_path / "go").touch()
        running.wait_for("report.0", "report.1", "report.2")
        for rank in range(3):
            report = running.read(f"report.{rank}")
            assert report["ended"] == "well" and report["members"] == [0, 1, 2], report


@pytest.mark.drill("killed on another host")
def test_three_go_on_when_one_is_killed(way: str, tmp_path: Path, note_time: Callable[[str, float], None]) -> None:
    """No other machine sees the process end: UCX or MPI reports that it cannot be reached, or the silence shows it."""
    with hosts(
        tmp_path, {**PLAN, "faults": [{"victim": 1, "step": 8, "when": "backward", "what": "kill"}]}, way
    ) as running:
        running.wait_for("resized.0", "resized.2", "resized.3")
        struck = running.read("fault.1")["at"]
        for rank in (0, 2, 3):
            note_time(f"kill -9 on another host, by {way}", running.read(f"resized.{rank}")[0]["at"] - struck)
        (tmp_path / "go").touch()
        running.wait_for("report.0", "report.2", "report.3")
        for rank in (0, 2, 3):
            report = running.read(f"report.{rank}")
            assert report["ended"] == "well" and report["members"] == [0, 2, 3], report


@pytest.mark.drill("stopped on another host")
def test_three_go_on_when_one_stands_still(way: str, tmp_path: Path, note_time: Callable[[str, float], None]) -> None:
    """Its connections stay, and the kernel of its host still answers: only its silence shows it."""
    plan = {**PLAN, "faults": [{"victim": 1, "step": 8, "when": "backward", "what": "stop"}]}
    with hosts(tmp_path, plan, way) as running:
        running.wait_for("resized.0", "resized.2", "resized.3")
        struck = running.read("fault.1")["at"]
        for rank in (0, 2, 3):
            [resize] = running.read(f"resized.{rank}")
            assert (resize["before"], resize["now"]) == (4, 3)
            note_time(f"SIGSTOP on another host, {running.silence_s:g} s of silence, by {way}", resize["at"] - struck)
            # Rank 0 hears only of two others, as in the test of two halves.
            assert resize["at"] - struck < bound(GOES_ON_WITHIN_S, 2 * running.silence_s)
        (tmp_path / "go").touch()
        running.wait_for("report.0", "report.2", "report.3")
        for rank in (0, 2, 3):
            report = running.read(f"report.{rank}")
            assert report["ended"] == "well" and report["members"] == [0, 2, 3], report


@pytest.mark.drill("two halves")
def test_two_halves_both_stop(way: str, tmp_path: Path, note_time: Callable[[str, float], None]) -> None:
    with hosts(tmp_path, PLAN, way) as running:
        running.wait_for("step.0", "step.1", "step.2", "step.3")
        running.cluster.part(["node2", "node3"])
        cut = time.time()
        running.wait_for("report.0", "report.1", "report.2", "report.3")
        for rank in range(4):
            report = running.read(f"report.{rank}")
            assert report["ended"] == "NoQuorum" and report["finite"] and not report["resized"], report
            note_time(f"halves of four hosts, {running.silence_s:g} s of silence", report["at"] - cut)
            # A rank hears of two others; it asks about the other ranks when it misses one of these.
            assert report["at"] - cut < bound(GOES_ON_WITHIN_S, 2 * running.silence_s)


@pytest.mark.drill("a short cut")
def test_a_short_cut_costs_nobody(way: str, tmp_path: Path) -> None:
    """A cut of three seconds is shorter than the silence, whose default is ten seconds."""
    with hosts(tmp_path, PLAN, way, silence_s=10) as running:
        running.wait_for("step.0", "step.1", "step.2", "step.3")
        running.cluster.cut("node3")
        (tmp_path / "go").touch()  # a step that was waiting for it begins while the host is cut off
        time.sleep(3)
        running.cluster.cut("node3", False)
        running.wait_for("report.0", "report.1", "report.2", "report.3")
        reports = [running.read(f"report.{rank}") for rank in range(4)]
        for report in reports:
            assert report["ended"] == "well" and report["members"] == [0, 1, 2, 3] and not report["resized"], report
        assert len({report["sha256"] for report in reports}) == 1
        assert max(max(report["seconds"]) for report in reports) > 1, "nobody noticed the cut; make it longer"


LATE = """
import os, sys, time, torch
import sordino.torch as hvd
if os.environ["RANK"] == "2":
    time.sleep(float(sys.argv[1]))
try:
    hvd.init()
except hvd.SordinoError as error:
    os.write(1, f"{type(error).__name__}: {error}\\n".encode())
    sys.exit(3)
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
os.write(1, f"{total:g} by {hvd.transport()}\\n".encode())
hvd.shutdown()
"""


@pytest.mark.drill("late on another host")
@pytest.mark.usefixtures("emulated_hosts")
@pytest.mark.parametrize("late_s", [2.0, 8.0])
def test_who_starts_late_is_waited_for_until_the_deadline(tmp_path: Path, late_s: float) -> None:
    if not build_info()["ucx"]:
        pytest.skip("this build has no UCX")
    script = tmp_path / "late.py"
    script.write_text(LATE)
    deadline = stretched(4.0) if late_s > 4 else HANG_S
    with Cluster(hosts=3, mbps=1000) as cluster:
        env = {"SORDINO_TIMEOUT_S": str(deadline)}
        done = cluster.processes(3, ["python", str(script), str(stretched(late_s))], env, HANG_S)
    lines = sorted(done.stdout.splitlines())
    if late_s < 4:
        assert lines == ["3 by ucx + shared memory"] * 3, done.stdout + done.stderr
    else:
        missed = [line for line in lines if line.startswith("Timeout: ")]
        assert len(missed) >= 2 and all("for ranks 2 to call" in line for line in missed[:2]), done.stdout + done.stderr
