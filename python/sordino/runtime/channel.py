"""What the same ranks do with the same tensors again and again, so that the core is told of it once.

A channel's exchanges run on a process set of their own, in the order of the calls, with no rank that coordinates. A
prepared reduction is negotiated each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sordino._core import Device, Exchange, Handle, Layout, ReceiveBuffer, Request, Route, Topology
from sordino.runtime import opcode
from sordino.runtime.autograd import allgather
from sordino.runtime.collectives import grouped_allreduce_
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST, common_device, core_device
from sordino.runtime.flat_buffer import FlatBuffer
from sordino.runtime.objects import allgather_object
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import describe

_PREPARED = 256  # exchanges that a channel remembers
_Key = tuple[Topology, FlatBuffer, Layout | None, bool, bool]


class Channel:
    """Where the exchanges of one object run.

    Args:
        members: ranks that make channels together.
        number: of the process set that exchanges run on, which has the same ranks or some of them; None on a rank that
            is not in it.
    """

    def __init__(self, context: Context, members: ProcessSet, number: int | None) -> None:
        self._context = context
        self._members = members
        self._number = number
        self._buffer = ReceiveBuffer(context.world)
        self._prepared: dict[_Key, Exchange] = {}
        self.shared = True
        """Whether all ranks have what they exchange in memory that their nodes share."""
        self.route = Route.HOST
        """How it goes if it is in memory of GPUs."""

    @property
    def serves_this_rank(self) -> bool:
        """Whether this rank can start exchanges."""
        return self._number is not None

    def compare(self, values: Sequence[FlatBuffer]) -> None:
        """Find how all ranks can reach what they exchange. Collective."""
        world = self._context.world
        shared = all(one.shared or one.core_device is not None for one in values) and world.shares_memory
        devices = [one.core_device for one in values]
        device = devices[0] if devices and all(one is not None for one in devices) else None
        label = self._context.plan_name("channel.shared", self._members.process_set_id)
        mine = torch.tensor(
            [[shared, device is not None, device is not None and world.can(device, "nccl")]], device=HOST
        )
        told = allgather(mine, name=label, process_set=self._members).bool()
        self.shared, on_devices, nccl = told.all(dim=0).tolist()
        if on_devices and device is not None:
            self.route = self._route(values, device, nccl)
        self._prepared.clear()

    def _route(self, values: Sequence[FlatBuffer], device: Device, nccl: bool) -> Route:
        """Return the best route that all ranks can take. Collective."""
        label = self._context.plan_name("channel.places", self._members.process_set_id)
        places = [self._context.world.locate(one.address, one.layout.bytes) for one in values]
        told = allgather_object((device.identity, places), name=label, process_set=self._members)
        if nccl and len({identity for identity, _ in told}) == len(told):
            return Route.NCCL
        direct = torch.tensor([self._reaches_all(device, [theirs for _, theirs in told])], device=HOST)
        all_direct = bool(allgather(direct, name=f"{label}.direct", process_set=self._members).all())
        return Route.DIRECT if all_direct else Route.HOST

    def _reaches_all(self, device: Device, places: Sequence[Sequence[bytes]]) -> bool:
        """Return whether this rank maps all arenas of its node's GPUs, and messages take those of others."""
        world = self._context.world
        here, found = world.nodes[self._context.rank], True
        for rank, theirs in zip(self._members.ranks or [], places):
            if world.nodes[rank] != here:
                found &= world.can(device, "send")
            elif rank != self._context.rank:
                found &= world.can(device, "map") and all(world.reaches(rank, place, device) for place in theirs)
        return found

    def start(
        self,
        name: str,
        topology: Topology,
        values: FlatBuffer,
        round: int = 0,
        others_only: bool = False,
        wait: bool = False,
        layout: Layout | None = None,
        after: Handle | None = None,
        serving: bool = False,
    ) -> Handle:
        """Begin an exchange of `values` in place.

        Args:
            name: of the exchange, for errors and traces; no other one under way on the same process set has it. Ranks
                match exchanges by their order.
            topology: who sends each segment to whom in a round, and with which weight.
            values: what is exchanged; it takes the result.
            round: of the topology.
            others_only: this rank's own values have no share in the result.
            wait: it is over on return.
            layout: how the values are cut into segments, if not as they are.
            after: the exchange begins on this rank when that is done, and fails if that failed.
            serving: this rank waits for the others without a deadline, and ends with them.
        """
        assert self._number is not None
        self._context.exchanges[self._number] += 1
        key = topology, values, layout, others_only, serving
        what = self._prepared.get(key)
        if what is None:
            if len(self._prepared) == _PREPARED:
                del self._prepared[next(iter(self._prepared))]  # the oldest
            what = self._prepared[key] = self._prepare(*key)
        return self._context.world.exchange(what, name, round, after, wait)

    def _prepare(
        self, topology: Topology, values: FlatBuffer, layout: Layout | None, others_only: bool, serving: bool
    ) -> Exchange:
        """Return what stays the same from one exchange to the next."""
        assert self._number is not None
        return Exchange(
            process_set=self._number,
            layout=layout or values.layout,
            topology=topology,
            source=values.address,
            result=values.address,
            shared=self.shared,
            without_own=others_only,
            receive_buffer=self._buffer,
            serving=serving,
            keep=values.arena,
            device=values.core_device,
            route=self.route,
        )


def wait_for_all(handles: Sequence[Handle]) -> None:
    """Wait for all, then raise what became of the first that failed."""
    failure: Exception | None = None
    for handle in handles:
        try:
            handle.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


class PreparedReduction:
    """All-reduces some tensors in place, together.

    Args:
        tensors: contiguous; they stay where they are.
        op: `Average`, `Sum`, ...
        name: the same on all ranks.
        process_set: the ranks.
    """

    def __init__(
        self, context: Context, tensors: Sequence[torch.Tensor], op: int, name: str, process_set: ProcessSet
    ) -> None:
        self._context, self._tensors = context, list(tensors)
        self._op, self._name, self._process_set = op, name, process_set
        self._full_name = context.operation_name("grouped_allreduce", name, process_set.process_set_id or 0)
        self._described = [describe(tensor, tensor) for tensor in tensors]
        self._device = core_device(common_device(tensors, "the tensors to be averaged"), context)

    def run(self) -> None:
        """Reduce them. Collective."""
        if self._context.outlasts:  # then the result goes to other memory first
            grouped_allreduce_(self._tensors, op=self._op, name=self._name, process_set=self._process_set)
            return
        request = Request(
            opcode.ALLREDUCE,
            self._full_name,
            self._described,
            self._op,
            process_set=self._process_set.process_set_id,
            keep=self._tensors,
            device=self._device,
        )
        self._context.world.run(request).wait()
