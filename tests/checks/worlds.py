"""The worlds in which checks run, and the choice of checks for each world.

The full selection is all checks in all worlds that they fit. `make test` takes a part of it by rule:

- of the combinations of a function's parameters, as many as are needed to have every value of every parameter once;
- each of them in one world, which depends on its name: processes only for checks that depend on how bytes move, or
  that threads cannot run;
- every world has checks, since there are many functions and they are spread evenly.
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from checks.registry import Check, all_checks


@dataclass(frozen=True)
class World:
    """A number of ranks, and how they reach each other.

    Attributes:
        kind: "sim" (threads), "mpi" (processes under mpirun), "local" or "ucx" (processes that `sordino run` starts, in
            shared memory or over UCX between nodes). The other kinds are threads with tensors on simulated GPUs: one
            GPU that all ranks map ("direct") or do not map ("staged"), or one GPU each, with NCCL ("nccl").
        per_node: ranks of a node, 0 for all.
        whole: whether all checks run there, not only checks that depend on the transport (for processes).
    """

    kind: str
    ranks: int
    per_node: int = 0
    shared: bool = True  # ranks of a node share memory
    gpu: bool = False
    whole: bool = True

    def __str__(self) -> str:
        nodes = f"x{self.per_node}" if self.per_node else ""
        return f"{self.kind}-{self.ranks}{nodes}" + "-unshared" * (not self.shared) + "-gpu" * self.gpu

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment that makes processes of one machine such a world."""
        layout = {"SORDINO_RANKS_PER_NODE": str(self.per_node), "SORDINO_SHARED_MEMORY": str(int(self.shared))}
        single_copy = str(int(self.ranks % 2 == 0))  # so that both ways are tested, whichever this machine would choose
        return layout | {"SORDINO_TRANSPORT": self.kind, "SORDINO_SINGLE_COPY": single_copy}

    @property
    def launcher(self) -> str:
        """The launcher that starts its processes; "" where ranks are threads."""
        return {"mpi": "mpi", "local": "local", "ucx": "local"}.get(self.kind, "")

    def fits(self, check: Check) -> bool:
        if check.worlds and str(self) not in check.worlds:
            return False
        if self.launcher:
            serves = check.serves("processes", self.ranks) or check.serves(self.kind, self.ranks)
            return serves and (self.whole or check.moves_bytes)
        if self.kind == "sim":
            return check.serves("sim", self.ranks)
        # Helpers have no GPU. The world of two ranks on one GPU runs all checks.
        return (
            check.serves("sim", self.ranks)
            and (self.kind != "nccl" or check.helpers == "")
            and (check.moves_bytes or (self.kind, self.ranks) == ("direct", 2))
        )


_THREADS = [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (3, 1), (4, 2), (5, 2)]
SIM = [World("sim", ranks, per_node) for ranks, per_node in _THREADS]
# Four ranks, because averages of four are also exact with NCCL.
DEVICES = [World("direct", 2), World("direct", 3, 1), World("staged", 5, 2), World("nccl", 4)]
MPI = [
    World("mpi", 2),
    World("mpi", 3),
    World("mpi", 4, whole=False),
    World("mpi", 5, whole=False),
    World("mpi", 3, 1, whole=False),
    World("mpi", 4, 2, whole=False),
    World("mpi", 3, shared=False, whole=False),
    World("mpi", 3, gpu=True, whole=False),
]
LOCAL = [
    World("local", 2),
    World("local", 4, whole=False),
    World("local", 4, 2, whole=False),
    World("local", 5, whole=False),
    World("ucx", 2, 1),
    World("ucx", 4, 2, whole=False),
    World("ucx", 4, 1, shared=False, whole=False),
    World("ucx", 5, 2, whole=False),
]
PROCESSES = [*MPI, *LOCAL]
# One start of a launcher serves all worlds with this number of ranks.
STARTS = {"mpi": (2, 3), "local": (2, 4)}
"""Numbers of ranks by launcher, for `make test`."""
WORLDS = [*SIM, *DEVICES, *PROCESSES]
QUICK_WORLDS = [world for world in WORLDS if not world.launcher or world.ranks in STARTS[world.launcher]]

Case = TypeVar("Case")


def covering(cases: Sequence[Case], values_of: Any, name: str) -> list[Case]:
    """Return a few cases that have every value of every parameter at least once. The choice varies with the name.

    Args:
        cases: all combinations.
        values_of: gives the parameters of a case as a dictionary.
        name: name of the parametrized function.
    """
    start = zlib.crc32(name.encode()) % len(cases)
    left = [(case, _named(values_of(case))) for case in [*cases[start:], *cases[:start]]]
    missing = set().union(*(values for _, values in left))
    chosen = []
    while missing or not chosen:
        best = max(left, key=lambda one: len(one[1] & missing))
        missing -= best[1]
        chosen.append(best[0])
        left.remove(best)
    return chosen


def _named(values: dict[str, Any]) -> set[tuple[str, str]]:
    """Return parameters and their values in a form that can be compared, whatever the values are."""
    named = set()
    for key, value in values.items():
        try:
            named.add((key, repr(value)))
        except ValueError:  # an integer with more digits than Python prints
            named.add((key, f"object {id(value)}"))
    return named


def all_pairs(worlds: Iterable[World]) -> list[tuple[World, Check]]:
    return [(world, check) for world in worlds for check in all_checks().values() if world.fits(check)]


@functools.cache
def quick_pairs() -> frozenset[tuple[World, str]]:
    """Return the worlds and the names of checks that `make test` runs."""
    functions = defaultdict(list)
    for check in all_checks().values():
        functions[check.function].append(check)
    chosen = set()
    for function, checks in functions.items():
        name = f"{function.__module__}.{function.__name__}"
        for check in covering(checks, lambda check: {**check.arguments, "helpers": check.helpers}, name):
            threads_do = "sim" in check.on and not check.moves_bytes
            fitting = [world for world in QUICK_WORLDS if world.fits(check) and not (world.launcher and threads_do)]
            worlds = [world for world in fitting if str(world) in check.quick] or fitting
            chosen.add((worlds[zlib.crc32(check.name.encode()) % len(worlds)], check.name))
    return frozenset(chosen)
