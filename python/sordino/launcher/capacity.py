"""Capacity of the hosts of a job, in ranks.

An absurd number of ranks is refused before mpirun starts, because mpirun would use up all memory.

Without --oversubscribe a machine takes 4 ranks per core, and at least 8; with it, 64 per core. In either case each rank
needs 100 MiB of its memory. Cores and memory of other hosts are not known here: their slots, at most 1024, count as
cores.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sordino.errors import UsageError

RANKS_PER_CORE = 4
AT_LEAST = 8
OVERSUBSCRIBED = 64
BYTES_PER_RANK = 100 << 20
MOST_SLOTS = 1024
# Other options and variables that give hosts to mpirun. The number of these hosts is unknown, except for Slurm's nodes.
_HOST_OPTIONS = re.compile(r"--?(hosts?|H|f|hostfile|machinefile|default-hostfile|add-hosts?|add-hostfile)")
_HOST_VARIABLES = (
    *("PBS_NODEFILE", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "HYDRA_HOST_FILE"),
    *("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile"),
)
_MOST_ELSEWHERE = 1 << 16


@dataclass(frozen=True)
class Machine:
    """Resources of a machine: cores, and bytes of memory (None: unknown)."""

    cores: int
    memory: int | None = None

    def most(self, oversubscribe: bool) -> int:
        """Return the maximum number of ranks."""
        most = OVERSUBSCRIBED * self.cores if oversubscribe else max(AT_LEAST, RANKS_PER_CORE * self.cores)
        return most if self.memory is None else max(1, min(most, self.memory // BYTES_PER_RANK))

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' * (self.cores != 1)}"
        return cores if self.memory is None else f"{cores} and {self.memory / (1 << 30):.1f} GiB"


def this_machine(root: str = "/") -> Machine:
    """Return the cores and the memory that this process may use; `root` is the folder of proc and sys."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _group_limit(root)
    return Machine(len(os.sched_getaffinity(0)), total if limit is None else min(total, limit))


def _group_limit(root: str) -> int | None:
    """Return the memory limit of this process's control groups (such as a container's) in bytes; None without one.

    The core reads it (csrc/base/limits.h). If the core cannot be loaded, ranks will report that.
    """
    try:
        from sordino import _core
    except ImportError:
        return None
    return _core.limits(root)["memory"]


def spreads(hosts: Sequence[str], extra: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether ranks may run on other hosts. Arguments are those of `check`."""
    return bool(hosts) or _names_hosts(extra, environment) or _slurm_nodes(environment) > 1


def _names_hosts(extra: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether options of mpirun, or variables such as a batch system's, name hosts for it."""
    options = (word.partition("=")[0] for word in extra)
    return any(map(_HOST_OPTIONS.fullmatch, options)) or any(environment.get(name) for name in _HOST_VARIABLES)


def _slurm_nodes(environment: Mapping[str, str]) -> int:
    """Return the number of nodes that Slurm gives to mpirun; 1 without Slurm."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", "")
    return int(nodes) if re.fullmatch(r"[1-9]\d{0,4}", nodes) else 1


def check(
    ranks: int,
    hosts: Sequence[str],
    extra: Sequence[str],
    environment: Mapping[str, str],
    here: Machine,
    oversubscribe: bool,
) -> None:
    """Raise UsageError if the number of ranks exceeds the capacity of the hosts.

    Args:
        ranks: number of processes to start.
        hosts: `name` or `name:slots` of each host; empty: this machine, or the nodes from a batch system.
        extra: options of mpirun, which may name hosts.
        environment: environment of mpirun, which may name hosts, too.
        here: this machine.
        oversubscribe: whether --oversubscribe was given.
    """
    if hosts:
        machines, where = [_machine(host, here) for host in hosts], f"--hosts {','.join(hosts)}"
    elif _names_hosts(extra, environment):
        if ranks > _MOST_ELSEWHERE:
            raise UsageError(f"-np {ranks}: the limit is {_MOST_ELSEWHERE} ranks; correct it")
        return
    else:
        nodes = _slurm_nodes(environment)
        machines = [here] * nodes
        where = f"this machine ({here})" if len(machines) == 1 else f"{nodes} nodes like this one ({here})"
    most, beyond = (sum(machine.most(how) for machine in machines) for how in (oversubscribe, True))
    if ranks > most:
        rule = f"{OVERSUBSCRIBED} per core" if oversubscribe else f"{RANKS_PER_CORE} per core, at least {AT_LEAST}"
        fix = "take fewer" + (f", or --oversubscribe, which allows {beyond}" if beyond > most else "")
        raise UsageError(
            f"-np {ranks}: there is room for {most} ranks on {where}: {rule}, each with 100 MiB of memory; {fix}"
        )


def _machine(host: str, here: Machine) -> Machine:
    name, _, slots = host.partition(":")
    count = int(slots or 1)
    if count > MOST_SLOTS:
        raise UsageError(f"--hosts: {host} has more slots than any machine has cores ({MOST_SLOTS}); correct it")
    return here if name in ("localhost", "127.0.0.1", socket.gethostname()) else Machine(count)
