"""Routes of gradients in Layered SGD: to the communicator of a group, among the communicators, and back.

    leg      among                topology   exists if
    mean     the group            Mean       one group on one node with shared memory: the only leg
    inward   each group           ToOwner    otherwise, with more than one rank per group
    across   the communicators    Mean       more than one group
    outward  each group           FromOwner  as inward

Each leg is an exchange that starts when the previous leg has ended (`after`). So progress threads do all the work, and
no Python code of a worker runs in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sordino._core import FromOwner, Handle, Layout, Mean, ToOwner, Topology
from sordino.algorithms.layered import Roles
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST
from sordino.runtime.exchange.channel import Channel, wait_for_all
from sordino.runtime.exchange.flat_buffer import FlatBuffer
from sordino.runtime.exchange.groups import own_channel
from sordino.runtime.exchange.helpers import Helpers
from sordino.runtime.process_set import ProcessSet, global_process_set


class BucketSpec(NamedTuple):
    """Description of a bucket that all ranks must know: its name, dtype code, and number of elements sent."""

    name: str
    dtype: int
    elements: int


class Leg(NamedTuple):
    """One leg of a route: an exchange that every bucket passes through."""

    label: str
    channel: Channel
    topology: Topology


class Route:
    """Route of some buckets: the legs of this rank. Construction is collective over all ranks that have a role.

    Attributes:
        flats: the elements of each bucket, as one segment that the communicator of a group owns.

    Args:
        context: the context of all ranks that have a role.
        members: the ranks that have a role.
        roles: their groups and communicators.
        specs: the buckets.
        device: the device of this rank's gradients.
    """

    def __init__(
        self,
        context: Context,
        members: ProcessSet,
        roles: Roles,
        specs: Sequence[BucketSpec],
        device: torch.device = HOST,
    ) -> None:
        def whole(spec: BucketSpec) -> Layout:
            return Layout([("whole", spec.dtype, (spec.elements,))], groups=[roles.place])

        self.flats = {spec.name: FlatBuffer(context, whole(spec), device) for spec in specs}

        def channel(parts: Sequence[Sequence[int]]) -> Channel:
            made = own_channel(context, members, parts)
            made.compare(list(self.flats.values()))
            return made

        length, groups = len(roles.groups[0]), len(roles.groups)
        workers = length - roles.dedicated
        nodes = {context.world.nodes[rank] for rank in members.ranks or ()}
        self._legs: list[Leg] = []
        self._under_way: dict[str, list[Handle]] = {}  # by bucket; kept, since a handle dropped too early leaks memory
        if length > 1:
            inward = channel(roles.groups)
            if groups == 1 and len(nodes) == 1 and inward.shared:
                self._add("mean", inward, Mean(length, workers))
                return
            self._add("inward", inward, ToOwner(length, workers))
        # Each leg has its own channel, because a bucket may go inward before the previous one goes outward.
        if groups > 1:
            self._add("across", channel([roles.communicators]), Mean(groups))
        if length > 1:
            self._add("outward", channel(roles.groups), FromOwner(length, workers))

    def _add(self, label: str, channel: Channel, topology: Topology) -> None:
        if channel.serves_this_rank:
            self._legs.append(Leg(label, channel, topology))

    def _start(self, name: str, leg: Leg, after: Handle | None = None, serving: bool = False) -> Handle:
        return leg.channel.start(f"{name}.{leg.label}", leg.topology, self.flats[name], after=after, serving=serving)

    def start(self, name: str, serving: bool = False) -> Handle:
        """Start to average a bucket. The handle is done when this rank has the average.

        With `serving` the exchanges wait for other ranks without a deadline.
        """
        handles = [self._start(name, self._legs[0], serving=serving)]
        for leg in self._legs[1:]:
            handles.append(self._start(name, leg, after=handles[-1], serving=serving))
        self._under_way[name] = handles
        return handles[-1]

    def serve(self) -> None:
        """Serve as a dedicated communicator: run the legs of every bucket in a loop, until an exchange raises.

        Raises:
            PeerLost: the workers have left or, if `World.failed`, a rank is lost.
        """
        first, *others = self._legs
        while True:
            coming = [(name, self._start(name, first, serving=True)) for name in self.flats]
            going: list[Handle] = []
            for name, come in coming:
                come.wait()
                after: Handle | None = None
                for leg in others:
                    after = self._start(name, leg, after=after)
                    going.append(after)
            wait_for_all(going)


def helper_route(helpers: Helpers, specs: Sequence[BucketSpec], device: torch.device = HOST) -> Route:
    """Return the route through a job's dedicated communicators. Collective over workers and communicators."""
    assert isinstance(helpers.roles, Roles)
    return Route(helpers.context, global_process_set, helpers.roles, specs, device)
