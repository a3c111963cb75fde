"""Exchanges of flat values: on a process set of their own, in the order of the calls, with no rank that coordinates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sordino._core import Handle, Inbox, Layout, Topology
from sordino.context import Context
from sordino.torch.autograd import allgather
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

    @property
    def serves_this_rank(self) -> bool:
        """Whether this rank can start exchanges."""
        return self._number is not None

    def compare(self, values: Sequence[FlatValues]) -> None:
        """Finds whether all ranks have what they exchange in memory that their nodes share. Collective."""
        mine = all(one.shared for one in values)
        label = self._context.plan_name("channel.shared", self._members.process_set_id)
        told = allgather(torch.tensor([int(mine)]), name=label, process_set=self._members)
        self.shared = bool(told.all())

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
