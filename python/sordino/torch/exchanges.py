"""Exchanges of flat values: on a process set of their own, in the order of the calls, with no rank that coordinates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sordino._core import Handle, Inbox, Topology
from sordino.context import Context
from sordino.torch.autograd import allgather
from sordino.torch.parameters import FlatValues
from sordino.torch.process_sets import ProcessSet


class Channel:
    """Where the exchanges of one object run.

    Args:
        members: the ranks that exchange.
        number: of the process set that exchanges run on, which has the same ranks.
    """

    def __init__(self, context: Context, members: ProcessSet, number: int) -> None:
        self._context = context
        self._members = members
        self._number = number
        self._inbox = Inbox(context.world)
        self._shared = True

    def compare(self, values: Sequence[FlatValues]) -> None:
        """Finds whether all ranks have what they exchange in memory that their nodes share. Collective."""
        mine = all(one.shared for one in values)
        label = self._context.plan_name("channel.shared", self._members.process_set_id)
        told = allgather(torch.tensor([int(mine)]), name=label, process_set=self._members)
        self._shared = bool(told.all())

    def start(
        self,
        name: str,
        topology: Topology,
        values: FlatValues,
        round: int = 0,
        others_only: bool = False,
        wait: bool = False,
    ) -> Handle:
        """Begins an exchange of `values` in place; with `others_only` this rank's own have no share in the result. With
        `wait` it is over on return."""
        return self._context.world.exchange(
            name=name,
            process_set=self._number,
            layout=values.layout,
            topology=topology,
            round=round,
            source=values.address,
            result=values.address,
            shared=self._shared,
            without_own=others_only,
            inbox=self._inbox,
            wait=wait,
            keep=values.arena,
        )
