"""What the reduction of gradients is made of: its settings, its segments, and the layout that all ranks must share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sordino._core import Handle, Layout
from sordino.context import Context
from sordino.errors import LayoutMismatch, UsageError
from sordino.torch.autograd import allgather
from sordino.torch.compression import Compression, Compressor
from sordino.torch.functions import allgather_object
from sordino.torch.parameters import FlatValues
from sordino.torch.process_sets import ProcessSet
from sordino.torch.tensors import Described, describe, dtype_code, label

Spec = tuple[str, int, tuple[int, ...]]

WHOLE = 1 << 62  # segment size of a layout that is not to be cut


class StepOrderError(UsageError, AssertionError):
    """backward, step, synchronize and zero_grad were called in an order that would lose gradients."""


@dataclass(frozen=True)
class Settings:
    """How gradients are reduced. The fields are the arguments of `DistributedOptimizer`."""

    op: int
    process_set: ProcessSet
    segment_bytes: int
    compression: type[Compressor] = Compression.none
    passes: int = 1
    predivide: float = 1.0
    sparse_as_dense: bool = False
    groups: tuple[tuple[int, ...], ...] = ()  # parameter indices that the user wants reduced together


@dataclass
class Segment:
    """Some parameters whose gradients are reduced as one operation."""

    name: str
    members: list[int]
    flags: torch.Tensor
    waiting: int = 0  # members whose gradient is not complete in this cycle
    complete: bool = False  # every member had a gradient on this rank when it was started
    handle: Handle | None = None
    sent: list[torch.Tensor] = field(default_factory=list)  # what is under way, by member
    states: list[Any] = field(default_factory=list)  # what compression needs to undo it
    views: list[torch.Tensor] | None = None  # the members' places in the arena
    arena: FlatValues | None = None
    described: list[Described] = field(default_factory=list)  # of views and flags, which never move

    def make_arena(self, context: Context, specs: Sequence[Spec], members: Sequence[torch.Tensor]) -> None:
        """Makes places in memory that the node shares, for gradients like `members`. TransportError: there is none."""
        flags = (f"{self.name}.flags", dtype_code(self.flags), (len(self.members),))
        layout = Layout([*specs, flags], WHOLE)
        self.arena = FlatValues(context, layout, self.flags.device)
        *views, flags_view = (
            self.arena.like(tensor, offset) for tensor, offset in zip([*members, self.flags], layout.offsets)
        )
        self.flags = flags_view.copy_(self.flags)
        self.views = views
        self.described = [describe(tensor, tensor) for tensor in (*views, self.flags)]


def say_used(flags: torch.Tensor, used: Sequence[bool]) -> bool:
    """Fills in which members have a gradient, without waiting for a GPU if all have; whether all have."""
    complete = all(used)
    if complete:
        flags.fill_(1)
    else:
        flags.copy_(torch.tensor(used))
    return complete


def whole_layout(names: Sequence[str], parameters: Sequence[torch.Tensor]) -> Layout:
    """All parameters as one layout, for its hash."""
    return Layout([(label(name, p), dtype_code(p), tuple(p.shape)) for name, p in zip(names, parameters)], WHOLE)


def check_same(context: Context, mine: str, process_set: ProcessSet) -> None:
    """Compares how ranks are set up. UsageError on every rank if they differ, with what the first two say that do.
    Collective."""
    label = context.plan_name("same", process_set.process_set_id)
    told: list[str] = allgather_object(mine, name=label, process_set=process_set)
    for rank, other in zip(process_set.ranks or [], told):
        if other != told[0]:
            first = (process_set.ranks or [])[0]
            raise UsageError(f"ranks {first} and {rank} are set up differently: {told[0]} and {other}")


def check_layout(context: Context, layout: Layout, process_set: ProcessSet) -> None:
    """Compares names, shapes and dtypes between ranks. LayoutMismatch on every rank if they differ, naming the first
    rank and tensor. Collective."""
    label = context.plan_name("layout", process_set.process_set_id)
    signed = layout.hash - (1 << 64) if layout.hash >= 1 << 63 else layout.hash
    hashes = allgather(torch.tensor([signed]), name=label, process_set=process_set).tolist()
    if len(set(hashes)) == 1:
        return
    members = process_set.ranks or []
    lines: list[list[str]] = allgather_object(layout.describe(), name=f"{label}.lines", process_set=process_set)
    for rank, other in zip(members, lines):
        for index in range(max(len(other), len(lines[0]))):
            here = lines[0][index] if index < len(lines[0]) else "nothing"
            there = other[index] if index < len(other) else "nothing"
            if here != there:
                raise LayoutMismatch(
                    f"ranks {members[0]} and {rank} wrap different models: parameter {index} is '{here}' on rank "
                    f"{members[0]} and '{there}' on rank {rank}"
                )
    raise LayoutMismatch("ranks wrap different models")
