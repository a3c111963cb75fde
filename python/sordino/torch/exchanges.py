"""Exchanges of flat values: on a process set of their own, in the order of the calls, with no rank that coordinates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sordino._core import Device, Handle, Inbox, Layout, Passage, Topology
from sordino.context import Context
from sordino.torch.autograd import allgather
from sordino.torch.functions import allgather_object
from sordino.torch.parameters import FlatValues
from sordino.torch.process_sets import ProcessSet


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
        self._inbox = Inbox(context.world)
        self.shared = True
        """Whether all ranks have what they exchange in memory that their nodes share."""
        self.passage = Passage.HOST
        """How it goes if it is in memory of GPUs."""

    @property
    def serves_this_rank(self) -> bool:
        """Whether this rank can start exchanges."""
        return self._number is not None

    def compare(self, values: Sequence[FlatValues]) -> None:
        """Finds how all ranks can reach what they exchange. Collective."""
        world = self._context.world
        shared = all(one.shared or one.device is not None for one in values) and world.shares_memory
        devices = [one.device for one in values]
        device = devices[0] if devices and all(one is not None for one in devices) else None
        label = self._context.plan_name("channel.shared", self._members.process_set_id)
        mine = torch.tensor([[shared, device is not None, device is not None and world.can(device, "nccl")]])
        told = allgather(mine, name=label, process_set=self._members).bool()
        self.shared, on_devices, nccl = told.all(dim=0).tolist()
        if on_devices and device is not None:
            self.passage = self._passage(values, device, nccl)

    def _passage(self, values: Sequence[FlatValues], device: Device, nccl: bool) -> Passage:
        """The best that all ranks can take. Collective."""
        label = self._context.plan_name("channel.places", self._members.process_set_id)
        places = [self._context.world.locate(one.address, one.layout.bytes) for one in values]
        told = allgather_object((device.identity, places), name=label, process_set=self._members)
        if nccl and len({identity for identity, _ in told}) == len(told):
            return Passage.NCCL
        direct = torch.tensor([self._reaches_all(device, [theirs for _, theirs in told])])
        all_direct = bool(allgather(direct, name=f"{label}.direct", process_set=self._members).all())
        return Passage.DIRECT if all_direct else Passage.HOST

    def _reaches_all(self, device: Device, places: Sequence[Sequence[bytes]]) -> bool:
        """Whether this rank maps all arenas of its node's GPUs, and messages take those of others."""
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
        values: FlatValues,
        round: int = 0,
        others_only: bool = False,
        wait: bool = False,
        layout: Layout | None = None,
        after: Handle | None = None,
        serving: bool = False,
    ) -> Handle:
        """Begins an exchange of `values` in place.

        Args:
            others_only: this rank's own values have no share in the result.
            wait: it is over on return.
            layout: how the values are cut into segments, if not as they are.
            after: the exchange begins on this rank when that is done, and fails if that failed.
            serving: this rank waits for the others without a deadline, and ends with them.
        """
        assert self._number is not None
        self._context.exchanges[self._number] += 1
        return self._context.world.exchange(
            name=name,
            process_set=self._number,
            layout=layout or values.layout,
            topology=topology,
            round=round,
            source=values.address,
            result=values.address,
            shared=self.shared,
            without_own=others_only,
            inbox=self._inbox,
            after=after,
            serving=serving,
            wait=wait,
            keep=values.arena,
            device=values.device,
            passage=self.passage,
        )


def wait_for_all(handles: Sequence[Handle]) -> None:
    """Waits for all, then raises what became of the first that failed."""
    failure: Exception | None = None
    for handle in handles:
        try:
            handle.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
