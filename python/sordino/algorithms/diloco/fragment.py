"""Fragment of DiLoCo: parameters that take an outer step together, and their outer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sordino.algorithms.diloco import DiLoCo
from sordino.algorithms.diloco.mean import mean_of
from sordino.runtime.context import Context
from sordino.runtime.exchange.flat_buffer import ParameterBuffer
from sordino.runtime.exchange.memory_order import Strided, to_memory_order, to_row_major
from sordino.runtime.exchange.residuals import Feedback
from sordino.runtime.exchange.saved_residuals import Piece
from sordino.runtime.process_set import ProcessSet


class Place(NamedTuple):
    """Place of elements in the flat tensors of a fragment.

    Attributes:
        number: number of the flat tensor.
        range: range of its elements.
    """

    number: int
    range: slice


@dataclass(frozen=True)
class Elements:
    """Elements of a parameter.

    Attributes:
        name: the name of the parameter.
        begin, end: the range of elements, in memory order.
        whole: number of elements of the parameter.
        values: the elements, 1-d.
    """

    name: str
    begin: int
    end: int
    whole: int
    values: torch.Tensor


@dataclass
class Carried:
    """Outer state that is transferred to an object with other parameters.

    Attributes:
        outer, momentum: outer parameters and momenta by the parameter's name, flat and in memory order.
        residuals: residuals of this rank (residuals.py).
        number: the number of this rank when the residuals were taken.
    """

    outer: dict[str, torch.Tensor]
    momentum: dict[str, torch.Tensor]
    residuals: dict[str, Any]
    number: int


class Fragment:
    """Parameters that take an outer step together, with their outer parameters and momentum.

    Outer parameters, momentum and changes each have one flat tensor in float64, for float64 parameters, and one in
    float32 for all others, because 16 bits would lose changes of the size of a rounding error. 16-bit parameters
    continue from the rounded outer parameters, so their changes count from there.

    Args:
        context: the context of this rank.
        process_set: the ranks.
        runs: the parameters, as flat tensors that share memory with the model's.
        name: name of the operations, the same on all ranks.
        algorithm: the algorithm with its settings.
    """

    def __init__(
        self, context: Context, process_set: ProcessSet, runs: Sequence[torch.Tensor], name: str, algorithm: DiLoCo
    ) -> None:
        self._algorithm = algorithm
        wide = {torch.float64: [run for run in runs if run.dtype == torch.float64]}
        wide[torch.float32] = [run for run in runs if run.dtype != torch.float64]
        self._parts = [ones for ones in wide.values() if ones]  # the runs of each flat tensor
        self.outer = [torch.cat([run.to(dtype) for run in ones]) for dtype, ones in wide.items() if ones]
        self.momentum = [torch.zeros_like(one) for one in self.outer] if algorithm.momentum > 0 else []
        self.mean = mean_of(context, process_set, self.outer, name, algorithm)
        self._strided: list[Strided] = []

    def restart(self) -> None:
        """Set the outer parameters to the parameters, with nothing in flight."""
        for run, outer in self._pairs(self.outer):
            outer.copy_(run)
        self.mean.continue_from([])

    def begin(self) -> None:
        """Start to average the changes of the workers since they had the outer parameters."""
        values = [torch.empty_like(one) for one in self.outer]
        for (run, value), (_, outer) in zip(self._pairs(values), self._pairs(self.outer)):
            if self._algorithm.averages_models:
                value.copy_(run)
            else:
                torch.sub(run, outer.to(run.dtype).to(outer.dtype), out=value)
        self.mean.begin(values)

    def apply(self) -> None:
        """Wait for the mean change, take the outer step, and mix the parameters with the outer parameters."""
        means = self.mean.finish()
        rate, factor = self._algorithm.rate, self._algorithm.momentum
        for number, (mean, outer) in enumerate(zip(means, self.outer)):
            if self._algorithm.averages_models:
                outer.copy_(mean)
                continue
            if not self.momentum:
                outer.add_(mean, alpha=rate)
                continue
            momentum = self.momentum[number].mul_(factor).add_(mean)
            if self._algorithm.nesterov:
                outer.add_(mean, alpha=rate).add_(momentum, alpha=rate * factor)
            else:
                outer.add_(momentum, alpha=rate)
        self.hand_out(self._algorithm.own_share)

    def hand_out(self, own_share: float = 0.0) -> None:
        """Move the parameters to the outer parameters, except for this share of their distance."""
        for run, outer in self._pairs(self.outer):
            run.copy_(outer if own_share == 0 else outer.lerp(run.to(outer.dtype), own_share))

    def place_of(self, values: torch.Tensor) -> Place | None:
        """Return the place of some elements of a run; None: the elements are in no run.

        Args:
            values: the elements, a contiguous 1-d tensor that shares memory with the run.
        """
        for number, runs in enumerate(self._parts):
            at = 0
            for run in runs:
                begin = (values.data_ptr() - run.data_ptr()) // run.element_size()
                if run.dtype == values.dtype and 0 <= begin < len(run):
                    return Place(number, slice(at + begin, at + begin + len(values)))
                at += len(run)
        return None

    def outer_of(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return the outer parameters of some elements of a run, as a view; None: the elements are in no run.

        Args:
            values: as in `place_of`.
        """
        place = self.place_of(values)
        return None if place is None else self.outer[place.number][place.range]

    def place(self, arena: ParameterBuffer) -> None:
        """Record the parameters of an arena whose elements are not in row-major order, for `saved` and `loaded`."""
        for tensor, offset in zip(arena.tensors, arena.layout.offsets):
            if tensor.is_contiguous():
                continue
            place = self.place_of(arena.flat(tensor.dtype, offset, tensor.numel()))
            if place is not None:
                self._strided.append(Strided.of(place.number, place.range.start, tensor))

    def saved(self, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of flat tensors such as `outer`, in row-major order, for checkpoints."""
        return to_row_major(flat, self._strided if flat else ())

    def loaded(self, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of flat tensors that `saved` has returned, in memory order."""
        return to_memory_order(flat, self._strided if flat else ())

    def attach(self, feedback: Feedback, elements: Iterable[Elements]) -> None:
        """Include the residuals of the mean in the state of `feedback`.

        Args:
            feedback: the residuals of this rank.
            elements: the elements of parameters in the runs, and possibly others.
        """
        pieces: list[list[Piece]] = [[] for _ in self._parts]
        for one in elements:
            place = self.place_of(one.values)
            if place is not None:
                pieces[place.number].append(Piece(one.name, one.begin, one.end, place.range.start, one.whole))
        for part, mean in zip(pieces, self.mean.encoded):
            feedback.attach(part, mean)

    def give(self, elements: Iterable[Elements], carried: Carried) -> None:
        """Add copies of the outer state of these elements to `carried`."""
        for one in elements:
            place = self.place_of(one.values)
            if place is not None:
                carried.outer[one.name] = self.outer[place.number][place.range].clone()
                if self.momentum:
                    carried.momentum[one.name] = self.momentum[place.number][place.range].clone()

    def take(self, elements: Iterable[Elements], carried: Carried) -> None:
        """Replace the outer state of these elements, as far as `carried` contains it."""
        for one in elements:
            place = self.place_of(one.values)
            if place is None or one.name not in carried.outer:
                continue
            self.outer[place.number][place.range].copy_(carried.outer[one.name])
            if self.momentum and one.name in carried.momentum:
                self.momentum[place.number][place.range].copy_(carried.momentum[one.name])

    def _pairs(self, flat: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the runs, each with its part of the flat tensors."""
        for ones, whole in zip(self._parts, flat):
            yield from zip(ones, whole.split([len(run) for run in ones]))


def elements_of(arena: ParameterBuffer) -> Iterator[Elements]:
    """Yield the elements of each parameter in an arena."""
    for name, tensor, offset in zip(arena.names, arena.tensors, arena.layout.offsets):
        if tensor.numel() > 0:
            values = arena.flat(tensor.dtype, offset, tensor.numel())
            yield Elements(name, 0, tensor.numel(), tensor.numel(), values)
