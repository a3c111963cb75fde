"""The way of gradients in Layered SGD: to the communicator of a group, round the communicators, and back.

Each leg is an exchange that begins when the one before is over (`after`), so progress threads do all of it and no
Python of a worker runs in between. A single group on one node needs one leg, in which all take the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sordino._core import FromOwner, Handle, Layout, Mean, ToOwner, Topology
from sordino.algorithms.layered import Roles
from sordino.runtime.channel import Channel, wait_for_all
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST
from sordino.runtime.flat_buffer import FlatBuffer
from sordino.runtime.groups import own_channel
from sordino.runtime.helpers import Helpers
from sordino.runtime.process_set import ProcessSet, global_process_set


class BucketSpec(NamedTuple):
    """What all ranks must know of a bucket: its name, its dtype's code, and how many elements travel."""

    name: str
    dtype: int
    elements: int


class Leg(NamedTuple):
    """One exchange of every bucket."""

    label: str
    channel: Channel
    topology: Topology


class Route:
    """The legs of some buckets that this rank takes part in.

    Attributes:
        flats: the elements of each bucket, as one piece that the communicator of a group owns.

    Args:
        context: of all ranks that have a role.
        everybody: those ranks. Collective over them.
        device: where this rank has its gradients.
    """

    def __init__(
        self,
        context: Context,
        everybody: ProcessSet,
        roles: Roles,
        specs: Sequence[BucketSpec],
        device: torch.device = HOST,
    ) -> None:
        def whole(spec: BucketSpec) -> Layout:
            return Layout([("whole", spec.dtype, (spec.elements,))], groups=[roles.place])

        self.flats = {spec.name: FlatBuffer(context, whole(spec), device) for spec in specs}

        def channel(parts: Sequence[Sequence[int]]) -> Channel:
            made = own_channel(context, everybody, parts)
            made.compare(list(self.flats.values()))
            return made

        length, groups = len(roles.groups[0]), len(roles.groups)
        workers = length - roles.dedicated
        nodes = {context.world.nodes[rank] for rank in everybody.ranks or ()}
        self._legs: list[Leg] = []
        self._under_way: dict[str, list[Handle]] = {}  # by bucket; a handle that is dropped before its end keeps memory
        if length > 1:
            inward = channel(roles.groups)
            if groups == 1 and len(nodes) == 1 and inward.shared:
                self._add("mean", inward, Mean(length, workers))
                return
            self._add("inward", inward, ToOwner(length, workers))
        # Each leg has a channel of its own: a bucket may go in while the one before has yet to come out.
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
        """Begin to average a bucket; done when this rank has the average.

        With `serving` it waits for the others without a deadline.
        """
        handles = [self._start(name, self._legs[0], serving=serving)]
        for leg in self._legs[1:]:
            handles.append(self._start(name, leg, after=handles[-1], serving=serving))
        self._under_way[name] = handles
        return handles[-1]

    def serve(self) -> None:
        """Do what a communicator that is no worker does: the same for every bucket, again and again, until it raises.

        Raises:
            PeerLost: the workers have left, or (`World.failed`) a rank is lost.
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
    """Return the way through the communicators of a job, as workers and communicators make it. Collective over them."""
    assert isinstance(helpers.roles, Roles)
    return Route(helpers.context, global_process_set, helpers.roles, specs, device)
