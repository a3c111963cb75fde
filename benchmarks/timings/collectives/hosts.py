"""Contestants of the benchmark of collectives on emulated hosts. Each job has its own cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cluster import Cluster
from sordino._core import build_info
from sordino.bench.contestants.launching import CONTESTANTS, Contestant, Start
from sordino.errors import NotBuilt, SordinoError

Starter = Literal["mpirun", "torchrun", "mpiexec"]

_TIMEOUT_S = 1800
_MPICH = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}  # otherwise libfabric looks for hardware


@dataclass(frozen=True)
class StartOnHosts(Start):
    """Start of a job on its own cluster.

    Attributes:
        command: path of mpiexec; for other launchers not used.
        ranks: number of ranks, in blocks over the hosts.
        hosts: number of hosts.
        mbps: rate of each link in each direction; None: as fast as the machine.
        starter: launcher.
    """

    ranks: int = 0
    hosts: int = 0
    mbps: float | None = None
    starter: Starter = "mpirun"
    environment: Mapping[str, str] = field(default_factory=dict)

    def folder(self) -> str | None:
        """Return None, because every host has its own /dev/shm."""
        return None

    def run(self, worker: Sequence[str]) -> tuple[int, str]:
        """Run the worker on a new cluster. SordinoError after 1800 s."""
        command, env = ["python", *worker], {"OMP_NUM_THREADS": "1", **self.environment}
        with Cluster(self.hosts, self.mbps) as cluster:
            try:
                if self.starter == "mpiexec":
                    done = cluster.mpiexec(Path(self.command[0]), self.ranks, command, env, timeout=_TIMEOUT_S)
                else:
                    run = cluster.torchrun if self.starter == "torchrun" else cluster.run
                    done = run(self.ranks, command, env, timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise SordinoError(f"not done after {_TIMEOUT_S} s") from error
        return done.returncode, done.stdout + done.stderr


def contestants(hosts: int, mbps: float | None) -> dict[str, Contestant]:
    """Return the contestants on hosts by name. `mbps` is the rate of each link; None: as fast as the machine."""

    def by(starter: Starter, over_ucx: bool = False) -> Callable[[int, Mapping[str, Path]], Start]:
        def start(ranks: int, _: Mapping[str, Path]) -> Start:
            if over_ucx and not build_info()["ucx"]:
                raise NotBuilt("this build has no UCX")
            return StartOnHosts([], ranks=ranks, hosts=hosts, mbps=mbps, starter=starter)

        return start

    def by_mpi(name: str, starter: Starter, **variables: str) -> Callable[[int, Mapping[str, Path]], Start]:
        def start(ranks: int, prefixes: Mapping[str, Path]) -> Start:
            here = CONTESTANTS[name].start(ranks, prefixes)
            environment = {"MPI4PY_LIBMPI": here.environment["MPI4PY_LIBMPI"], **variables}
            return StartOnHosts(here.command[:1], environment, ranks, hosts, mbps, starter)

        return start

    return {
        "ordinary": Contestant("Sordino over UCX", "ordinary", by("torchrun", True)),
        "arena": Contestant("Sordino over UCX, arena memory", "arena", by("torchrun", True)),
        "asynchronous": Contestant("Sordino over UCX, asynchronous", "asynchronous", by("torchrun", True)),
        "distributed": Contestant("Sordino over UCX, torch.distributed", "distributed", by("torchrun", True)),
        "over_mpi": Contestant("Sordino over MPI", "ordinary", by("mpirun")),
        "openmpi": Contestant("Open MPI", "mpi", by_mpi("openmpi", "mpirun")),
        "mpich": Contestant("MPICH", "mpi", by_mpi("mpich", "mpiexec", **_MPICH)),
        "gloo": Contestant("Gloo", "gloo", by("torchrun")),
    }
