"""`sordino run --host-discovery-script`: processes follow the hosts that a script names. ssh is a script that runs the
command on this machine."""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import forked
import pytest
from checks.commands import SORDINO
from launched import Started

from sordino.cli import run
from sordino.errors import UsageError

WORKER = Path(__file__).with_name("elastic_hosts_worker.py")
SSH = """#!/bin/sh
# ssh [OPTIONS] HOST COMMAND
while [ $# -gt 2 ]; do shift; done
echo "$1 $$" >> {folder}/reached
sh -c "$2"
"""


class Job(Started):
    """A job whose hosts are the lines of a file."""

    def __init__(self, folder: Path, hosts: Sequence[str], options: Sequence[str], command: Sequence[str] = ()) -> None:
        self.folder, self._hosts, ssh = folder, folder / "hosts", folder / "ssh"
        ssh.write_text(SSH.format(folder=folder))
        ssh.chmod(0o700)
        self.name(*hosts)
        words = ["--host-discovery-script", f"cat {self._hosts}", "--ssh", f"{ssh} -o An=Option", *options]
        command = command or [*forked.python(), str(WORKER), str(folder)]
        super().__init__(folder, [*SORDINO, "run", *words, "--", *command])

    def name(self, *hosts: str) -> None:
        new = self._hosts.with_suffix(".new")
        new.write_text("".join(f"{host}\n" for host in hosts))
        new.replace(self._hosts)

    def trains(self, *sizes: int) -> None:
        """Wait until ranks have trained in worlds of these sizes, one after the other."""
        wanted = [f"trains on {size}" for size in sizes]
        self.wait_for(lambda: [line for line in self.output.splitlines() if line.startswith("trains on")] == wanted)

    def workers(self) -> list[int]:
        files = list(self.folder.glob("pid.*"))
        living = self.processes()
        return sorted(pid for pid in (int(file.suffix[1:]) for file in files) if pid in living)

    def reached(self) -> dict[str, list[int]]:
        """Return the processes of ssh, by host."""
        found: dict[str, list[int]] = {}
        for line in (self.folder / "reached").read_text().splitlines():
            host, pid = line.split()
            found.setdefault(host, []).append(int(pid))
        return found

    def finish(self) -> int:
        """Let the ranks end. Return the exit status."""
        (self.folder / "over").touch()
        return self.ends()


@pytest.fixture(autouse=True)
def quick_agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield


@pytest.mark.drill("hosts come and go")
def test_the_job_follows_its_hosts(tmp_path: Path) -> None:
    """The job begins with one rank. A new host gets a process, which joins. When the host is removed, its process
    leaves in good order."""
    with Job(tmp_path, ["localhost"], ["--max-np", "2"]) as job:
        job.trains(1)
        job.name("localhost:1", "elsewhere:5")
        job.trains(1, 2)
        job.name("localhost:1")
        job.trains(1, 2, 1)
        job.wait_for(lambda: not set(job.reached()["elsewhere"]) & set(job.processes()))
        assert job.finish() == 0, job.output
        assert job.reached().keys() == {"elsewhere"}, "not more than --max-np"
        assert len(job.reached()["elsewhere"]) == 1
        assert "elsewhere has fewer slots" in job.output
        assert "failed" not in job.output
        job.leaves_nothing()


@pytest.mark.drill("hosts come and go")
def test_who_leaves_is_replaced(tmp_path: Path) -> None:
    """A rank leaves in good order, as before the end of a spot instance. The job continues."""
    with Job(tmp_path, ["localhost:2"], ["-np", "2"]) as job:
        job.trains(2)
        os.kill(job.workers()[-1], signal.SIGTERM)
        job.trains(2, 1, 2)
        assert job.finish() == 0, job.output
        assert "failed" not in job.output
        job.leaves_nothing()


@pytest.mark.drill("too few ranks remain")
def test_training_waits_for_min_np(tmp_path: Path) -> None:
    """A rank is killed. The other one waits until a new process has joined."""
    with Job(tmp_path, ["localhost:1", "elsewhere:1"], ["--min-np", "2"]) as job:
        job.trains(2)
        os.kill(job.workers()[-1], signal.SIGKILL)
        job.trains(2, 2)
        assert job.finish() == 0, job.output
        assert "training waits, because there are 1 ranks and SORDINO_MIN_RANKS=2" in job.output
        assert "1 process failed; the others finished" in job.output
        job.leaves_nothing()


@pytest.mark.drill("a connection to a host is lost")
def test_a_process_ends_with_its_connection(tmp_path: Path) -> None:
    """The launcher cannot reach the host any more, so the agent there ends the process."""
    with Job(tmp_path, ["localhost:1", "elsewhere:1"], ["-np", "2", "--grace", "60"]) as job:
        job.trains(2)
        before = job.workers()
        os.kill(job.reached()["elsewhere"][0], signal.SIGKILL)
        job.wait_for(lambda: len(set(before) & set(job.workers())) == 1)
        assert job.finish() == 0, job.output
        job.leaves_nothing()


@pytest.mark.drill("too few ranks remain")
def test_a_job_without_enough_ranks_ends(tmp_path: Path) -> None:
    with Job(tmp_path, ["localhost:2"], ["--min-np", "2", "--elastic-timeout", "1"]) as job:
        job.trains(2)
        job.name("localhost:1")
        assert job.ends() == 1
        assert "for 1 s only 1 process of 2 run. Let --host-discovery-script name more hosts" in job.output
        job.leaves_nothing()


@pytest.mark.drill("too few hosts at the start")
@pytest.mark.parametrize("script", ["echo localhost:1", "exit 3"])
def test_a_job_that_cannot_begin(tmp_path: Path, script: str) -> None:
    words = ["--host-discovery-script", f"sh -c {script!r}", "-np", "2", "--elastic-timeout", "1"]
    with Started(tmp_path, [*SORDINO, "run", *words, "--", "true"]) as job:
        assert job.ends() == 1
        assert f"for 1 s only {'1 slot' if 'echo' in script else '0 slots'} of 2 are there" in job.output
        assert script.startswith("echo") or "it has ended with status 3" in job.output


@pytest.mark.drill("a failure before the ranks have met")
@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["sh", "-c", "test $RANK = 0 || exit 7; sleep 1000"], 7),
        (["sh", "-c", "test $RANK = 0 || kill -9 $$; sleep 1000"], 137),
        (["/no/such/program"], 127),
    ],
)
def test_the_status_of_a_start_that_fails(tmp_path: Path, command: list[str], status: int) -> None:
    with Job(tmp_path, ["localhost:1", "elsewhere:1"], ["-np", "2"], command) as job:
        assert job.ends() == status, job.output
        assert status != 127 or "/no/such/program: No such file or directory" in job.output
        assert "was the first to fail" in job.output
        job.leaves_nothing()


SAYS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (print("told", flush=True), sys.exit(3)))
print(os.environ["LOCAL_RANK"], os.environ["GIVEN"], os.environ["SORDINO_RESTART"], "SORDINO_TOKEN" in os.environ)
time.sleep(1000)
"""


@pytest.mark.drill("signals for an elastic job")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 3), (signal.SIGKILL, -9)])
def test_signals_reach_all_processes(tmp_path: Path, number: int, status: int) -> None:
    """Lines are printed at once, although the output is a pipe. A killed launcher leaves nothing."""
    options = ["-np", "2", "-x", "GIVEN=yes"]
    with Job(tmp_path, ["elsewhere:2"], options, ["python", "-c", SAYS]) as job:
        job.wait_for(lambda: {"0 yes 0 True", "1 yes 0 True"} <= set(job.output.splitlines()))
        job.send(job.front.pid, number)
        assert job.ends() == status, job.output
        assert number != signal.SIGUSR1 or "told" in job.output
        job.leaves_nothing()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--min-np", "2"], "--min-np needs --host-discovery-script"),
        (["--ssh", "x"], "--ssh needs --host-discovery-script"),
        (["--elastic-timeout", "600"], "--elastic-timeout needs --host-discovery-script"),
        (["--host-discovery-script", "x", "--oversubscribe"], "--oversubscribe contradicts --host-discovery-script"),
        (["--host-discovery-script", "x", "-x", "SORDINO_ON_PEER_LOST=raise"], "SORDINO_ON_PEER_LOST=continue"),
        (["--host-discovery-script", "x", "-x", "SORDINO_MIN_RANKS=2"], "contradicts SORDINO_MIN_RANKS=1"),
        (["--host-discovery-script", "x", "--respawn", "2"], "--respawn contradicts --host-discovery-script"),
        (["--host-discovery-script", "x", "--hosts", "a"], "--hosts contradicts --host-discovery-script"),
        (["--host-discovery-script", "x", "--min-np", "3", "-np", "2"], "--min-np 3, -np 2, --max-np"),
        (["--host-discovery-script", "x", "--elastic-timeout", "nan"], "--elastic-timeout nan: must be 0 or more"),
    ],
)
def test_wrong_options(words: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    with pytest.raises(UsageError, match=re.escape(message)):
        run.main(parser.parse_args([*words, "true"]))
