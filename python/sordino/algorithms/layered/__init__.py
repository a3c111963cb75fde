"""Layered SGD: synchronous SGD whose all-reduce hides behind the work between two steps, such as loading data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sordino._core import Mean
from sordino.algorithms.base import Algorithm, Simulation, Traits, made
from sordino.algorithms.checks import require
from sordino.algorithms.traffic import Exchange, Model, Operation, Phase, Traffic, from_owners, hidden, to_owners
from sordino.errors import UsageError

if TYPE_CHECKING:
    from sordino.runtime.exchange.helpers import Helpers, Service
    from sordino.runtime.gradients.options import Options


@dataclass(frozen=True)
class Roles:
    """Groups of ranks that average gradients, and the communicator of each group.

    Attributes:
        groups: the ranks of each group, including its communicator; all groups have the same length.
        place: index of the communicator within its group.
        dedicated: whether communicators are separate ranks without a model.
    """

    groups: list[list[int]]
    place: int
    dedicated: bool

    @property
    def communicators(self) -> list[int]:
        """The communicator of each group."""
        return [group[self.place] for group in self.groups]

    @property
    def helpers(self) -> list[int]:
        """The ranks that have no model."""
        return self.communicators if self.dedicated else []

    @property
    def workers(self) -> list[int]:
        """All ranks that train."""
        return [rank for group in self.groups for rank in group if rank not in self.helpers]

    def of(self, ranks: Sequence[int]) -> Roles:
        """Return the roles with each rank replaced by `ranks[rank]`, to convert places in a process set to ranks."""
        return Roles([[ranks[index] for index in group] for group in self.groups], self.place, self.dedicated)


@dataclass(frozen=True)
class Layered(Algorithm):
    """Layered SGD: gradients are averaged in groups, then among the groups' communicators, then sent back.

    The step that uses them is postponed until the script first uses a parameter.

    Parameters equal those of `AllReduce` within rounding, and bit for bit if both add in the same order (one group).
    No wait occurs between `step()` and the first use of a parameter: load the next batch there. Any read or write of a
    parameter or its gradient in the thread that called `step()` (forward, `state_dict()`, clipping, evaluation, moving
    averages) first completes the step, with the learning rate that was set when `step()` was called. Uses in other
    threads, or of memory obtained earlier (`numpy()`, `data_ptr()`), are not noticed: call `optimizer.flush()` before
    them. `check_stale=True` finds such places.

    Sent per step and worker, of M bytes and for P groups: M to its communicator and back; each communicator sends
    2(P-1)/P M to the others; no other rank sends across groups. A single group on one node reads and writes its
    members' memory in one pass. Staleness: none. Memory: the gradients once more. When a peer dies: every remaining
    rank, communicators included, gets `PeerLost`. Source: Yu et al., Layered SGD, Algorithm 3.

    Attributes:
        group_size: K, the number of workers in a group of neighboring ranks; must divide the number of workers. None:
            the workers of a node.
        communicator: "thread": the progress thread of the group's first worker; "rank": the last rank of each group,
            which has no model and only communicates. "rank" needs `init(algorithm=...)`.
        check_stale: while a step is postponed, other threads that use a parameter get `StepOrderError`, and its memory
            is filled with NaN. For debugging: it copies the parameters twice per step.
        bucket_bytes: gradients are averaged in buckets of up to this many bytes, each as soon as it is complete.
    """

    group_size: int | None = None
    communicator: Literal["thread", "rank"] = "thread"
    check_stale: bool = False
    bucket_bytes: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        fine = self.group_size is None or self.group_size >= 1
        require(fine, self, "group_size", "must be at least 1, or None for the ranks of a node")
        require(self.communicator in ("thread", "rank"), self, "communicator", "must be 'thread' or 'rank'")
        require(self.bucket_bytes >= 1, self, "bucket_bytes", "must be at least 1")

    steps = "sordino.algorithms.layered.strategy:LayeredStrategy"
    simulation = Simulation(
        arrays="synchronous",
        imitated=frozenset({"group_size", "bucket_bytes"}),
        refused={"communicator": "in a simulation all ranks are workers; there are no dedicated communicators"},
    )

    @property
    def traits(self) -> Traits:
        return Traits(
            same_gradients=True,
            bucket_bytes=self.bucket_bytes,
            ends_with="Layered",
            whole_parameters="it postpones steps until a parameter is used, and cannot see that torch uses a shard",
        )

    def check(self, options: Options) -> None:
        super().check(options)
        if options.gradient_predivide_factor != 1.0:
            raise UsageError("gradient_predivide_factor needs AllReduce; Layered averages group by group")

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        roles = self.roles(nodes)
        groups, communicators = np.array(roles.groups), np.array([roles.communicators])
        count, length = groups.shape
        workers = length - roles.dedicated
        one_place = count == 1 and len(set(nodes)) == 1
        buckets = model.buckets(self.bucket_bytes)
        operations: list[Operation] = []
        for number, size in enumerate(buckets):
            whole = [0.0] * roles.place + [size]  # the communicator owns the whole bucket
            tensors = len(model.sizes) if number == 0 else 0
            if one_place:
                operations.append(Exchange(groups, Mean(length, workers), whole, tensors=tensors))
                continue
            if length > 1:
                operations.append(to_owners(groups, whole, workers=workers, tensors=tensors))
            if count > 1:
                operations.append(Exchange(communicators, Mean(count), [size]))
            if length > 1:
                operations.append(from_owners(groups, whole, workers=workers))
        return Traffic([Phase(operations, hides=hidden(buckets), loading=True)])

    def models(self, size: int) -> int:
        return 1

    # ---- ranks without a model ---------------------------------------------------------------------------------

    @property
    def dedicated(self) -> bool:
        return self.communicator == "rank"

    def helped_alike(self, other: Algorithm) -> bool:
        return isinstance(other, Layered) and other.dedicated and other.group_size == self.group_size

    def open_service(self, helpers: Helpers, description: Any) -> Service:
        service: Service = made("sordino.algorithms.layered.routes:helper_route", helpers, description)
        return service

    def roles(self, nodes: Sequence[int]) -> Roles:
        """Return the roles of ranks 0, 1, ...; `nodes` has the node of each.

        Raises:
            UsageError: the ranks cannot be divided into equal groups.
        """
        size = len(nodes)
        if self.group_size is None:
            length = list(nodes).count(nodes[0])
            if size % length != 0 or any(nodes[rank] != nodes[rank - rank % length] for rank in range(size)):
                raise UsageError("Layered(): nodes have different numbers of ranks; give group_size=1, or a divisor")
        else:
            length = self.group_size + self.dedicated
        if length < 1 + self.dedicated:
            raise UsageError(
                f"Layered(communicator={self.communicator!r}): a group needs a worker and a communicator, but a node "
                "has one rank"
            )
        if size % length != 0:
            members = f"{length - self.dedicated} workers" + (" and a communicator" if self.dedicated else "")
            raise UsageError(f"{self!r}: {size} ranks cannot be divided into groups of {members}")
        groups = [list(range(begin, begin + length)) for begin in range(0, size, length)]
        return Roles(groups, length - 1 if self.dedicated else 0, self.dedicated)
