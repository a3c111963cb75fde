"""Clusters of namespaces: a job spans their hosts, their links keep their rates, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pace import HANG_S, bound

from cluster import Cluster
from cluster.__main__ import main
from sordino.errors import NotBuilt, UsageError

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
MBPS = 200
MIB = 6

NODES = """
import socket, torch, sordino.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((1000,), float(hvd.rank())), op=hvd.Sum)
assert total.eq(6).all()
places = hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
print(socket.gethostname(), *places, flush=True)
"""

# Script that repeats a transfer as many times as its argument says, and prints the seconds of the fastest one.
STREAM = f"""
import sys, time
from mpi4py import MPI
world, data = MPI.COMM_WORLD, bytearray({MIB} << 20)
took = []
for _ in range(int(sys.argv[1])):
    world.Barrier()
    begin = time.perf_counter()
    world.Send(data, 1) if world.rank == 0 else world.Recv(data, 0)
    world.Barrier()
    took.append(time.perf_counter() - begin)
if world.rank == 0:
    print(min(took), flush=True)
"""


class Traces:
    """Finder of a cluster's remains, by a mark that its processes inherit in their environment."""

    def __init__(self, mark: str) -> None:
        self._mark = f"SORDINO_TEST_MARK={mark}".encode()
        self._namespaces: set[str] = set()
        self._interfaces = self._links()

    def processes(self) -> list[int]:
        """Return all processes with the mark but this one; note their network namespaces."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                    self._namespaces.add(os.readlink(folder / "ns/net"))
                    found.append(int(folder.name))
            except OSError:
                continue
        self._namespaces.discard(os.readlink("/proc/self/ns/net"))
        return found

    def left(self) -> list[str]:
        """Return the remaining processes, network namespaces, and interfaces of this machine."""
        left = [f"process {pid}" for pid in self.processes()]
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns/net") in self._namespaces:
                    left.append(f"process {folder.name} in a namespace of the cluster")
            except OSError:
                continue
        mounts = Path("/proc/self/mountinfo").read_text()
        left += [f"{name} is mounted" for name in self._namespaces if name in mounts]
        return left + sorted(self._links() - self._interfaces)

    @staticmethod
    def _links() -> set[str]:
        listing = subprocess.run(["ip", "-oneline", "link"], capture_output=True, text=True, check=True).stdout
        return {line.split(":")[1].strip() for line in listing.splitlines()}


@pytest.fixture
def traces(emulated_hosts: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    mark = uuid.uuid4().hex
    traces = Traces(mark)
    monkeypatch.setenv("SORDINO_TEST_MARK", mark)
    yield traces
    assert traces.left() == []


def test_a_job_spans_the_hosts_and_nothing_is_left(traces: Traces) -> None:
    with Cluster(hosts=2, mbps=MBPS) as cluster:
        assert traces.processes()
        done = cluster.run(ranks=4, command=["python", "-c", NODES], timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.split("\n")[:-1]) == [
            "node0 0 0 2 0 2",
            "node0 1 1 2 0 2",
            "node1 2 0 2 1 2",
            "node1 3 1 2 1 2",
        ]
    assert traces.left() == []


def test_links_keep_to_the_rate(traces: Traces) -> None:
    pytest.importorskip("mpi4py")
    with Cluster(hosts=2, mbps=MBPS) as cluster:
        done = cluster.run(ranks=2, command=["python", "-c", STREAM, "1"], timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        sent = cluster.traffic()["node0"].sent
    at_the_rate = (MIB << 20) * 8 / (MBPS * 1e6)
    assert at_the_rate <= float(done.stdout) < bound(at_the_rate)
    assert MIB << 20 <= sent <= 1.1 * (MIB << 20) + 200_000, "what MPI starts a job with takes less than 200 kB"


def test_each_link_may_have_a_rate_of_its_own(traces: Traces) -> None:
    pytest.importorskip("mpi4py")
    took = {}
    for rates in ((10 * MBPS, MBPS), (10 * MBPS, 10 * MBPS)):
        with Cluster(hosts=2, mbps=rates) as cluster:
            done = cluster.run(ranks=2, command=["python", "-c", STREAM, "5"], timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        took[min(rates)] = float(done.stdout)
    at_the_rate = (MIB << 20) * 8 / (MBPS * 1e6)
    assert at_the_rate <= took[MBPS], "the slower end decides"
    # One undisturbed transfer out of five shows that this link has more.
    assert took[10 * MBPS] < took[MBPS] / 2


def test_the_command_takes_a_rate_for_each_host(traces: Traces, capfd: pytest.CaptureFixture[str]) -> None:
    show = ["sh", "-c", 'echo "$(hostname) $(tc qdisc show dev eth0)"']
    assert main(["--hosts", "2", "--mbps", "100,2000", "--", *show]) == 0
    told = dict(line.split(" ", 1) for line in capfd.readouterr().out.splitlines())
    assert "rate 100Mbit" in told["node0"]
    assert "rate 2Gbit" in told["node1"]


def test_one_host_uses_no_link(traces: Traces) -> None:
    pytest.importorskip("mpi4py")
    with Cluster(hosts=1, mbps=1) as cluster:
        done = cluster.run(ranks=2, command=["python", "-c", STREAM, "1"], timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        assert cluster.traffic()["node0"].sent < 200_000


def test_uneven_ranks_environment_folder_and_status(
    traces: Traces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Cluster(hosts=2) as cluster:
        tell = ["sh", "-c", 'echo "$(hostname) $WORD $PWD"']
        done = cluster.run(ranks=3, command=tell, env={"WORD": "two words"})
        assert sorted(filter(None, done.stdout.splitlines())) == [
            f"node0 two words {tmp_path}",
            f"node0 two words {tmp_path}",
            f"node1 two words {tmp_path}",
        ]
        assert done.returncode == 0
        assert cluster.run(ranks=2, command=["sh", "-c", "exit 3"]).returncode == 3


def test_two_clusters_do_not_meet(traces: Traces) -> None:
    with Cluster(hosts=2) as one, Cluster(hosts=2) as other:
        for cluster in (one, other):
            assert sorted(cluster.run(ranks=2, command=["hostname"], timeout=HANG_S).stdout.split()) == [
                "node0",
                "node1",
            ]
        other.close()
        assert sorted(one.run(ranks=2, command=["hostname"], timeout=HANG_S).stdout.split()) == ["node0", "node1"]


def test_an_exception_leaves_nothing(traces: Traces) -> None:
    with pytest.raises(ZeroDivisionError), Cluster(hosts=2, mbps=MBPS):
        assert traces.processes()
        raise ZeroDivisionError
    assert traces.left() == []


def test_a_failure_half_way_leaves_nothing(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.hosts._bucket", lambda mbps: ["nonsense"])
    with pytest.raises(NotBuilt, match=r"modprobe .* sch_tbf"), Cluster(hosts=2, mbps=MBPS):
        pass
    monkeypatch.setattr("cluster.hosts._HOST", "echo Operation not permitted >&2; exit 1")
    with pytest.raises(NotBuilt, match=r"Operation not permitted.*--privileged"), Cluster(hosts=2):
        pass


def test_a_job_that_takes_too_long_is_ended(traces: Traces) -> None:
    with Cluster(hosts=2) as cluster:
        idle = len(traces.processes())
        with pytest.raises(subprocess.TimeoutExpired):
            cluster.run(ranks=2, command=["sleep", "1000"], timeout=1)
        until(lambda: len(traces.processes()) == idle, "the job's processes are gone")
        assert cluster.run(ranks=2, command=["true"]).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_tool_leaves_nothing(traces: Traces, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "cluster", "--hosts", "2", "--mbps", "100", "--", "sh", "-c", "echo up; sleep 1000"]
    tool = subprocess.Popen(
        words,
        cwd=BENCHMARKS,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Tests in the background of a shell start with SIGINT ignored, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert tool.stdout is not None
    assert [tool.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    assert len(traces.left()) > 4, "what is looked for is found while it is there"
    tool.send_signal(number)
    assert tool.wait(HANG_S) in (-number, 130)
    until(lambda: not traces.left(), "nothing is left")
    tool.stdout.close()


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--hosts", "2", "--", "true"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(job) == 2
    assert "needs root" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(job) == 2
    assert "needs `ip`" in capsys.readouterr().err


def test_nonsense_is_refused(emulated_hosts: None) -> None:
    for hosts, mbps in ((0, None), (1000, None), (2, 0), (2, float("nan")), (2, (100, 0))):
        with pytest.raises(UsageError):
            Cluster(hosts, mbps)
    with pytest.raises(UsageError, match="2 rates for 3 hosts"):
        Cluster(3, (100, 1000))
    closed = Cluster(hosts=1)
    with pytest.raises(UsageError, match="not open"):
        closed.traffic()


def until(true: Callable[[], bool], what: str, seconds: float = HANG_S) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)
