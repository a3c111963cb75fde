"""Reducer that averages gradients in shards, of which each rank of a group owns one.

Each rank owns an equal part (a shard) of every bucket. It averages the gradients of that part, steps the optimizer on
it alone, and then sends the parameters to the other ranks of the group.

A bucket's parameters and gradients are views of two arenas, each divided into one shard per rank. So there are two
exchanges: in the first, the owner of a shard gets the mean over all ranks; in the second, all ranks get the owner's
values. A shard can begin or end within a parameter, so the optimizer steps a list of slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sordino._core import FromOwner, Handle, Layout, ToOwner
from sordino.errors import StepOrderError
from sordino.runtime.collectives.autograd import allreduce
from sordino.runtime.collectives.operation import Average, Max, Sum
from sordino.runtime.collectives.ops import grouped_allreduce_
from sordino.runtime.context import Context
from sordino.runtime.exchange.channel import Channel, wait_for_all
from sordino.runtime.exchange.flat_buffer import FlatBuffer, move
from sordino.runtime.gradients.bucket import Bucket
from sordino.runtime.gradients.flat_reducer import FlatGradients, FlatReducer, part_length
from sordino.runtime.gradients.guard import uses_of
from sordino.runtime.gradients.settings import Settings
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import dtype_code


@dataclass(frozen=True)
class Slice:
    """The part of a parameter that a rank owns.

    Attributes:
        parameter: the number of the parameter.
        begin, end: range of elements of the parameter, in memory order.
        values: these elements, as the parameter that the optimizer steps; [end - begin].
        gradient: their gradient.
    """

    parameter: int
    begin: int
    end: int
    values: torch.Tensor
    gradient: torch.Tensor


class Shards(FlatGradients):
    """One bucket: its parameters, their gradients, and the part that this rank owns.

    Args:
        members: the numbers of the bucket's parameters.
        parameters: all parameters; the members move into the arena.
        place: position of this rank in its group of `size` ranks.
    """

    def __init__(
        self, context: Context, members: Sequence[int], parameters: Sequence[torch.Tensor], place: int, size: int
    ) -> None:
        dtype = parameters[members[0]].dtype
        self.members = list(members)
        self._place = place
        count = sum(parameters[i].numel() for i in members)
        shard = part_length(count, size, dtype.itemsize)
        code = dtype_code(parameters[members[0]])
        specs = [(f"shard {k}", code, (shard,)) for k in range(size)]
        flags = [(f"flags for {k}", code, (len(members),)) for k in range(size)]
        place_in = parameters[members[0]].device
        self.values = FlatBuffer(context, Layout(specs, groups=list(range(size))), place_in)
        self.gradients = FlatBuffer(context, Layout(specs + flags, groups=list(range(2 * size))), place_in)
        offsets = self.gradients.layout.offsets[size:]
        super().__init__([], [self.gradients.flat(dtype, offset, len(members)) for offset in offsets])
        self.owned = self.values.flat(dtype, 0, size * shard)[place * shard : (place + 1) * shard]
        gradients = self.gradients.flat(dtype, 0, size * shard)
        owned_gradients = gradients[place * shard : (place + 1) * shard]
        self.owned_gradients = [owned_gradients, self.flags[place]]
        self.slices: list[Slice] = []
        self._value_views: list[torch.Tensor] = []
        offset = 0
        for i in self.members:
            parameter = parameters[i]
            self._value_views.append(self.values.like(parameter, offset * dtype.itemsize))
            self.views.append(self.gradients.like(parameter, offset * dtype.itemsize))
            begin, end = (
                min(max(edge - offset, 0), parameter.numel()) for edge in (place * shard, (place + 1) * shard)
            )
            if begin < end:
                inside = slice(offset + begin - place * shard, offset + end - place * shard)
                values = torch.nn.Parameter(self.owned[inside], requires_grad=parameter.requires_grad)
                self.slices.append(Slice(i, begin, end, values, owned_gradients[inside]))
            offset += parameter.numel()
        self._uses = [uses_of(view) + 1 for view in self._value_views]  # expected uses: by the view and the parameter

    @property
    def taken_out(self) -> bool:
        """Whether a view of a parameter's memory exists elsewhere, through which it may be read unnoticed."""
        return any(uses_of(view) > uses for view, uses in zip(self._value_views, self._uses))

    def adopt(self, parameters: Sequence[torch.Tensor]) -> None:
        """Move parameters back if their memory was replaced. Raises UsageError for another shape or dtype."""
        for i, view in zip(self.members, self._value_views):
            if parameters[i].data_ptr() != view.data_ptr():
                move(parameters[i], view)

    @torch.no_grad()
    def adopt_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copy gradients that were replaced since they were averaged. A gradient set to None counts as unused."""
        for number, (i, view) in enumerate(zip(self.members, self.views)):
            grad = parameters[i].grad
            if grad is None:
                self.complete = False
                for flags in self.flags:
                    flags[number] = 0
            elif grad.data_ptr() != view.data_ptr():
                view.copy_(grad)

    def averaged(self) -> list[bool]:
        """Return, for each member, whether this rank's part of its gradient has an average."""
        if self.complete:
            return [True] * len(self.members)
        return (self.flags[self._place] > 0).tolist()


class ShardedReducer(FlatReducer):
    """Reducer that averages gradients over a group, each rank its own shard, and steps the optimizer on the shard.

    Args:
        channel: the channel of the group.
    """

    instead_of_sparse = 'or exchange="allreduce"'
    instead_of_compression = 'exchange="allreduce"'

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        settings: Settings,
        channel: Channel,
    ) -> None:
        super().__init__(context, names, parameters, settings)
        self.across: ProcessSet | None = None
        """Ranks of other groups over which gradients are averaged, too; None: gradients stay within the group."""
        self.trial: Callable[[], None] | None = None
        """Function that is called before the next step, once this rank has all gradients."""
        ranks = settings.process_set.ranks or []
        self._size, self._place = len(ranks), ranks.index(context.rank)
        self._channel = channel
        self.shards: dict[str, Shards] = {}
        """The shards of each bucket, in the order of the plan."""
        self.owned: list[torch.Tensor] = []
        """The part of the parameters that this rank owns, bucket by bucket."""
        self._handed_out = False  # whether all ranks of the group have this cycle's averages
        self._slices: dict[int, Slice] = {}  # the slices that this rank owns, by parameter
        self._numbers = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._to_owner, self._from_owner = ToOwner(self._size), FromOwner(self._size)

    def slices(self) -> dict[int, Slice]:
        """Return the slices that this rank owns, by the number of the parameter."""
        return self._slices

    def _agree(self, indices: Sequence[int]) -> None:
        super()._agree(indices)
        self._channel.compare(
            [values for shards in self.shards.values() for values in (shards.values, shards.gradients)]
        )

    def _make_bucket(self, name: str, members: list[int]) -> Bucket:
        shards = Shards(self.context, members, self.parameters, self._place, self._size)
        shards.adopt(self.parameters)
        self.shards[name] = self._flats[name] = shards
        self.owned.append(shards.owned)
        self._slices.update({piece.parameter: piece for piece in shards.slices})
        return super()._make_bucket(name, members)

    # ---- gradients ---------------------------------------------------------------------------------------------

    def begin_cycle(self) -> None:
        super().begin_cycle()
        self._handed_out = False

    def _exchange(self, bucket: Bucket) -> Handle:
        return self._channel.start(f"{bucket.name}.reduce", self._to_owner, self.shards[bucket.name].gradients)

    def _reduce(self) -> None:
        """Average every gradient that is not averaged yet. Only its owner gets the result."""
        if not self.active or self._counter.done:
            return
        super().synchronize()
        if self.across is not None:
            tensors = [tensor for shards in self.shards.values() for tensor in shards.owned_gradients]
            grouped_allreduce_(tensors, op=Average, name=f"{self._name}.across", process_set=self.across)

    @property
    def _name(self) -> str:
        return f"shards.{self._layout.hash:x}"

    def synchronize(self) -> None:
        """Average all gradients and send them to all ranks of the group, so that they can be clipped or inspected."""
        if not self.active or self._handed_out:
            return
        self._reduce()
        self._show_pending()
        self._hand_out_gradients()

    def _hand_out_gradients(self) -> None:
        wait_for_all([self.give(name, "gradients") for name in self.shards])
        for shards in self.shards.values():
            for i, view, used in zip(shards.members, shards.views, shards.used()):
                self.parameters[i].grad = view if used else None
        self._handed_out = True

    @property
    def final(self) -> bool:
        return not self.active or self._handed_out

    @torch.no_grad()
    def clip(self, limit: float, norm_type: float, strict: bool) -> torch.Tensor:
        """Clip by the norm of all gradients. Each rank scales the gradients that it owns."""
        if self._handed_out or not self.active:
            return super().clip(limit, norm_type, strict)
        self._reduce()
        self._pending.hide()  # other parts than this rank's own are not averaged
        owned = [shards.owned_gradients[0] for shards in self.shards.values()]
        norms = [torch.linalg.vector_norm(one, norm_type).to(torch.float64) for one in owned]
        mine = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        name = f"{self._name}.norm"
        if math.isinf(norm_type):
            total = allreduce(mine, op=Max, name=name, process_set=self.settings.process_set)
        else:
            powers = allreduce(mine**norm_type, op=Sum, name=name, process_set=self.settings.process_set)
            total = powers ** (1 / norm_type)
        if strict and not bool(total.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is not finite, so they cannot be clipped; "
                "error_if_nonfinite=False scales them in any case"
            )
        torch._foreach_mul_(owned, torch.clamp(limit / (total + 1e-6), max=1.0).item())
        return total

    # ---- the step ----------------------------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, synchronize: bool) -> Any:
        """Run the optimizer's step on this rank's slices. A closure is evaluated once, before the reduction.

        That is valid because element-wise optimizers evaluate a closure once and first.
        """
        loss = closure() if closure is not None else None
        self._show_pending()
        if synchronize:
            self._reduce()
        elif not self._counter.done:
            raise StepOrderError(
                "step() within skip_synchronize() uses averaged gradients: call synchronize() before it"
            )
        if self.trial is not None and not self._handed_out:
            self._hand_out_gradients()
        for shards in self.shards.values():
            shards.adopt(self.parameters)
            if self._handed_out:
                shards.adopt_gradients(self.parameters)
            used = dict(zip(shards.members, shards.averaged() if self._counter.done else [False] * len(shards.members)))
            for piece in shards.slices:
                piece.values.grad = piece.gradient if used[piece.parameter] else None
        if self.trial is not None:
            self.trial()
        with self.on_slices(optimizer):
            optimizer.step()
        whole = self._handed_out
        self.reset()
        if not whole:
            self._pending.hide(used=True)
            self.touched = True  # zero_grad() must make the hidden gradients visible again
        return loss

    def hand_out(self) -> None:
        """Send the parameters from their owners to all ranks of the group, and wait."""
        handles = []
        for name in self.shards:
            handles.append(self.give(name, "values"))
        wait_for_all(handles)

    def give(self, name: str, what: Literal["values", "gradients"]) -> Handle:
        """Start to send a bucket's values or gradients from their owners to all ranks of the group."""
        return self._channel.start(f"{name}.{what}", self._from_owner, getattr(self.shards[name], what))

    @contextmanager
    def on_slices(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Replace the optimizer's parameters, within the context, by the slices that this rank owns."""
        numbers, owned = self._numbers, self._slices
        whole: list[list[torch.Tensor]] = []
        try:
            for group in optimizer.param_groups:
                mine: list[torch.Tensor] = []
                for parameter in group["params"]:
                    piece = owned.get(numbers[id(parameter)])
                    if piece is not None:
                        mine.append(piece.values)
                whole.append(group["params"])
                group["params"] = mine
            yield
        finally:
            for group, parameters in zip(optimizer.param_groups, whole):
                group["params"] = parameters
