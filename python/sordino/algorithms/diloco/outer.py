"""The outer step of DiLoCo, on the fragments of one rank's parameters.

All ranks hold the same outer parameters and momentum, and change them by the same mean. So they stay equal, bit for
bit, without being sent.

With overlap the mean of a fragment is in flight during some steps: `exchange` begins it, and `apply` finishes it and
takes the outer step. At most one fragment is in flight. Until `apply` has the mean, it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sordino.algorithms.diloco import DiLoCo, fragment_of
from sordino.algorithms.diloco.mean import mean_of
from sordino.algorithms.gossip.mixing import Peers, take_from_first
from sordino.runtime.context import Context
from sordino.runtime.exchange.flat_buffer import ParameterBuffer
from sordino.runtime.process_set import ProcessSet


class Fragment:
    """Parameters that take an outer step together, with their outer parameters and momentum.

    Outer parameters, momentum and changes are one flat tensor each per width: float64, and float32 for all others,
    because in 16 bits changes of the size of a rounding error would be lost.

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

    def restart(self) -> None:
        """Make the parameters the outer parameters, with nothing in flight."""
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
                torch.sub(run, outer, out=value)
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

    def outer_of(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return the outer parameters of some elements of a run, as a view; None: the elements are in no run.

        Args:
            values: the elements, a contiguous 1-d tensor that shares memory with the run.
        """
        for run, outer in self._pairs(self.outer):
            begin = (values.data_ptr() - run.data_ptr()) // run.element_size()
            if run.dtype == values.dtype and 0 <= begin < len(run):
                return outer[begin : begin + len(values)]
        return None

    def _pairs(self, flat: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the runs, each with its part of the flat tensors."""
        for ones, whole in zip(self._parts, flat):
            yield from zip(ones, whole.split([len(run) for run in ones]))


class OuterStep:
    """Mixing of DiLoCo: in each exchange one fragment takes its outer step, or begins it."""

    def __init__(self, peers: Peers, arena: ParameterBuffer, algorithm: DiLoCo) -> None:
        algorithm.check_fragments(max(arena.segment_count, 1))
        self._peers, self._arena, self._algorithm = peers, arena, algorithm
        count = algorithm.fragments
        members = [[run for segment, run in arena.runs if fragment_of(segment, count) == one] for one in range(count)]
        self._fragments = [
            Fragment(peers.context, peers.process_set, runs, f"{peers.name}.{number}", algorithm)
            for number, runs in enumerate(members)
        ]
        self._begun = False

    @torch.no_grad()
    def begin(self) -> None:
        """Start from the parameters of the first rank, also where ranks have given different ones."""
        if self._begun:
            return
        self._arena.adopt()
        self._peers.judge(self._arena.names, self._arena.tensors)
        take_from_first(self._peers, self._arena)
        self.all_are_alike()

    @torch.no_grad()
    def all_are_alike(self) -> None:
        # After a loss this object is new, with momentum 0, because some ranks may have taken an outer step that others
        # have not.
        self._arena.adopt()
        for fragment in self._fragments:
            fragment.restart()
        self._begun = True

    @property
    def pending(self) -> bool:
        """Whether a fragment is in flight."""
        return any(fragment.mean.pending for fragment in self._fragments)

    @torch.no_grad()
    def exchange(self, round: int) -> None:
        self.apply()  # there is one only in a state that was saved with a longer overlap than this algorithm's
        self._fragments[round % len(self._fragments)].begin()
        if self._algorithm.overlap == 0:
            self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Wait for the fragment in flight, if there is one, and take its outer step.

        Raises:
            PeerLost, Timeout, TransportError: its all-reduce has failed. Nothing is changed.
        """
        for fragment in self._fragments:
            if fragment.mean.pending:
                fragment.apply()

    def flush(self) -> None:
        self.apply()

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put the outer parameters into the model within the block, if training has begun."""
        if not self._begun:
            yield
            return
        with self._arena.restoring([run for _, run in self._arena.runs]):
            with torch.no_grad():
                for fragment in self._fragments:
                    fragment.hand_out()
            yield

    def state(self) -> dict[str, Any]:
        """Return the state. The mean of a fragment in flight is waited for, and is part of it until it is applied.

        With a codec it is not waited for. Then the state has what this rank has sent.
        """
        if not self._begun:
            return {}
        state: dict[str, Any] = {
            "outer": [one.clone() for fragment in self._fragments for one in fragment.outer],
            "momentum": [one.clone() for fragment in self._fragments for one in fragment.momentum],
        }
        if self.pending:  # fragments in flight, by their numbers
            state["pending"] = {
                number: fragment.mean.state()
                for number, fragment in enumerate(self._fragments)
                if fragment.mean.pending
            }
        return state

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        outer = [one for fragment in self._fragments for one in fragment.outer]
        momentum = [one for fragment in self._fragments for one in fragment.momentum]
        # If the state is of other parameters, `begin` starts anew from the current ones.
        saved, its_momentum = state.get("outer", []), state.get("momentum", [])
        self._begun = _alike(outer, saved)
        pending = state.get("pending", {}) if self._begun else {}
        for number, fragment in enumerate(self._fragments):
            fragment.mean.continue_from(pending.get(number, []))
        if not self._begun:
            return
        for target, value in zip(outer, saved):
            target.copy_(value)
        if _alike(momentum, its_momentum):
            for target, value in zip(momentum, its_momentum):
                target.copy_(value)
        else:  # one of the two has a momentum factor of 0, and so no momentum
            for target in momentum:
                target.zero_()


def _alike(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Return whether two lists have tensors of the same dtypes and shapes."""
    return [(one.dtype, one.shape) for one in some] == [(one.dtype, one.shape) for one in others]
