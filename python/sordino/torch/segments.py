"""What the reduction of gradients is made of: its settings, its segments, and the layout of what is reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sordino._core import Handle, Layout
from sordino.context import Context
from sordino.torch.agreement import Agreement
from sordino.torch.compression import Compression, Compressor
from sordino.torch.finite import Evidence, FiniteCheck
from sordino.torch.parameters import FlatValues
from sordino.torch.process_sets import ProcessSet
from sordino.torch.tensors import Described, describe, dtype_code, label

Spec = tuple[str, int, tuple[int, ...]]

WHOLE = 1 << 62  # segment size of a layout that is not to be cut


@dataclass(frozen=True)
class Settings:
    """How gradients are reduced. The fields are the arguments of `DistributedOptimizer`, and what the ranks that it is
    used on must have in common."""

    op: int
    process_set: ProcessSet
    segment_bytes: int
    agreement: Agreement
    compression: type[Compressor] = Compression.none
    passes: int = 1
    predivide: float = 1.0
    sparse_as_dense: bool = False
    groups: tuple[tuple[int, ...], ...] = ()  # parameter indices that the user wants reduced together
    finite: FiniteCheck | None = None
    members: tuple[int, ...] = ()  # of the process set when the algorithm was chosen, by their first ranks

    def look(self, members: Sequence[int], gradients: Sequence[torch.Tensor]) -> Evidence | None:
        """With check_finite: which of these, that are about to be sent, are not finite."""
        return None if self.finite is None else Evidence(members, gradients)

    def judge(self, names: Sequence[str], tensors: Sequence[torch.Tensor], together: bool = False) -> None:
        """With check_finite: parameters that are about to be exchanged. Collective if `together`, or if ranks exchange
        in step."""
        if self.finite is not None:
            self.finite.judge_parameters(names, tensors, together)

    def guarded(self, optimizer: Any, refused: Callable[[], None]) -> Any:
        """The optimizer; with check_finite one that judges gradients before it steps, and calls `refused` if it does
        not."""
        return optimizer if self.finite is None else self.finite.guard(optimizer, refused)

    def refusals(self, segments: Iterable[Segment], others: Iterable[Evidence | None]) -> list[Exception]:
        """With check_finite: what is to be raised now that gradients have been reduced, of which this rank had sent
        those of `segments`, and others."""
        if self.finite is None:
            return []
        return self.finite.verdict([*(segment.looked for segment in segments), *others])


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
    looked: Evidence | None = None  # at what was sent last, with check_finite

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
