"""Repeated communication of the same tensors among the same ranks, which is described to the core only once.

A channel's exchanges run on a separate process set, in the order of the calls, without a coordinator. A prepared
reduction is an ordinary operation. Ranks may agree on its repetitions in a turn (one_shot.h), without a coordinator.
All ranks of a channel take the same route if the tensors are in GPU memory:

| route | taken if |
|---|---|
| NCCL | all ranks can use NCCL, each with another GPU |
| DIRECT | otherwise; each rank maps the arenas of its node, and can send from GPU memory to other nodes |
| HOST | otherwise; also if some rank has values outside of GPU memory |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sordino._core import Device, Exchange, Handle, Layout, ReceiveBuffer, Request, Route, Topology
from sordino.runtime import opcode
from sordino.runtime.collectives.autograd import allgather
from sordino.runtime.collectives.objects import allgather_object
from sordino.runtime.collectives.ops import grouped_allreduce_
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST, common_device, core_device
from sordino.runtime.exchange.flat_buffer import FlatBuffer
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import describe

_PREPARED = 256  # maximum number of prepared exchanges of a channel
_Key = tuple[Topology, FlatBuffer, Layout | None, bool, bool]


class Channel:
    """Channel for the exchanges of one object.

    Args:
        context: the context of this rank.
        members: ranks that create channels together.
        number: process set that the exchanges run on, which has all or some of these ranks; None on a rank that is not
            in it.
    """

    def __init__(self, context: Context, members: ProcessSet, number: int | None) -> None:
        self._context = context
        self._members = members
        self._number = number
        self._buffer = ReceiveBuffer(context.world)
        self._prepared: dict[_Key, Exchange] = {}
        self.shared = True
        """Whether all ranks have the exchanged values in GPU memory or in memory that their node shares."""
        self.route = Route.HOST
        """Route of values in GPU memory."""

    @property
    def serves_this_rank(self) -> bool:
        """Whether this rank can start exchanges."""
        return self._number is not None

    def compare(self, values: Sequence[FlatBuffer]) -> None:
        """Determine `shared` and `route`. Collective over all members."""
        world = self._context.world
        shared = all(one.shared or one.core_device is not None for one in values) and world.shares_memory
        devices = [one.core_device for one in values]
        device = devices[0] if devices and all(one is not None for one in devices) else None
        label = self._context.names.plan("channel.shared", self._members.process_set_id)
        mine = torch.tensor(
            [[shared, device is not None, device is not None and world.can(device, "nccl")]], device=HOST
        )
        gathered = allgather(mine, name=label, process_set=self._members).bool()
        self.shared, on_devices, nccl = gathered.all(dim=0).tolist()
        if on_devices and device is not None:
            self.route = self._route(values, device, nccl)
        self._prepared.clear()

    def _route(self, values: Sequence[FlatBuffer], device: Device, nccl: bool) -> Route:
        """Return the best route that all ranks can take. Collective."""
        label = self._context.names.plan("channel.places", self._members.process_set_id)
        places = [self._context.world.locate(one.address, one.layout.bytes) for one in values]
        gathered = allgather_object((device.identity, places), name=label, process_set=self._members)
        if nccl and len({identity for identity, _ in gathered}) == len(gathered):
            return Route.NCCL
        direct = torch.tensor([self._reaches_all(device, [theirs for _, theirs in gathered])], device=HOST)
        all_direct = bool(allgather(direct, name=f"{label}.direct", process_set=self._members).all())
        return Route.DIRECT if all_direct else Route.HOST

    def _reaches_all(self, device: Device, places: Sequence[Sequence[bytes]]) -> bool:
        """Return whether this rank can map all arenas of its node's GPUs, and send from GPU memory to other nodes."""
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
            name: name of the exchange for errors and traces. It must differ from those in flight on the same process
                set. Ranks match exchanges by their order.
            topology: sender, receiver and weight of each segment in each round.
            values: the values to exchange, overwritten with the result.
            round: round of the topology.
            others_only: leave this rank's own values out of the sum. The weights stay, so along `RandomCycle` the
                result is half of the peer's value.
            wait: return only when the exchange is complete.
            layout: division into segments; None: the layout of `values`.
            after: operation after which the exchange begins on this rank. If it fails, the exchange fails.
            serving: this rank waits for the others without a deadline, until they leave.
        """
        assert self._number is not None
        self._context.internal.exchanges[self._number] += 1
        key = topology, values, layout, others_only, serving
        what = self._prepared.get(key)
        if what is None:
            if len(self._prepared) == _PREPARED:
                del self._prepared[next(iter(self._prepared))]  # the oldest
            what = self._prepared[key] = self._prepare(*key)
        return self._context.world.exchange(what, name, round, after, wait)

    def start_message(self, sends: bool, message: torch.Tensor, rank: int, tag: int) -> Handle:
        """Begin to send a message to another rank of the channel, or to receive one from it.

        Args:
            sends: whether to send; False: receive.
            message: contiguous tensor in host memory. It must not be changed, or used, until the handle's `wait()`
                returns.
            rank: the other rank, in the world.
            tag: number from 0 on. Messages with the same tag arrive in the order of the calls.
        """
        assert self._number is not None
        handle: Handle = self._context.messenger(sends, False, message, rank, tag, self._number)
        return handle

    def _prepare(
        self, topology: Topology, values: FlatBuffer, layout: Layout | None, others_only: bool, serving: bool
    ) -> Exchange:
        """Return the part of an exchange that does not change between calls."""
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
    """Wait for all handles, then raise the error of the first one that failed."""
    failure: Exception | None = None
    for handle in handles:
        try:
            handle.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


class PreparedReduction:
    """All-reduce of some tensors in place as one operation, to be run repeatedly.

    Args:
        context: the context of this rank.
        tensors: contiguous tensors on one device, whose memory must not move.
        op: `Average`, `Sum`, ...
        name: name of the operation, the same on all ranks.
        process_set: the ranks.
    """

    def __init__(
        self, context: Context, tensors: Sequence[torch.Tensor], op: int, name: str, process_set: ProcessSet
    ) -> None:
        self._context, self._tensors = context, list(tensors)
        self._op, self._name, self._process_set = op, name, process_set
        self._full_name = context.names.operation("grouped_allreduce", name, process_set.process_set_id or 0)
        self._described = [describe(tensor, tensor) for tensor in tensors]
        self._device = core_device(common_device(tensors, "the tensors to be averaged"), context)

    def run(self) -> None:
        """Reduce the tensors, and wait. Collective."""
        if self._context.survives_losses:  # needs a result in separate memory, so that the reduction can be repeated
            grouped_allreduce_(self._tensors, op=self._op, name=self._name, process_set=self._process_set)
        else:
            self._context.world.run(self._request()).wait()

    def start(self) -> Handle:
        """Begin to reduce the tensors, and return at once. Collective.

        The core's thread moves the data. Until the handle's `wait()` returns, the tensors must not be used, and no
        other reduction of this object may run. `wait()` raises PeerLost, Timeout or TransportError if the reduction
        has failed. Then the values of the tensors are undefined, and their memory must not be used again, because data
        may still arrive in it.
        """
        return self._context.world.submit(self._request())

    def _request(self) -> Request:
        return Request(
            opcode.ALLREDUCE,
            self._full_name,
            self._described,
            self._op,
            process_set=self._process_set.process_set_id,
            keep=self._tensors,
            device=self._device,
        )
