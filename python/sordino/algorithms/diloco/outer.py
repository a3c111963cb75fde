"""The outer step of DiLoCo, on the fragments of one rank's parameters.

All ranks hold the same outer parameters and momentum, and change them by the same mean. So they stay equal, bit for
bit, without being sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sordino.algorithms.diloco import DiLoCo, fragment_of
from sordino.algorithms.gossip.mixing import Peers
from sordino.runtime.collectives.operation import Average
from sordino.runtime.collectives.ops import broadcast_
from sordino.runtime.exchange.channel import PreparedReduction
from sordino.runtime.exchange.flat_buffer import ParameterBuffer


class _Fragment:
    """Parameters that take an outer step together, as flat tensors that share memory with the model's."""

    def __init__(self, peers: Peers, runs: list[torch.Tensor], number: int) -> None:
        self.runs = runs
        # In 16 bits, changes of the size of a rounding error would be lost.
        wide = [run.float() if run.element_size() < 4 else run.clone() for run in runs]
        self.outer, self.momentum = wide, [torch.zeros_like(one) for one in wide]
        name = f"{peers.name}.{number}"
        self._mean = PreparedReduction(peers.context, runs, Average, name, peers.process_set) if runs else None

    def average(self) -> None:
        """Replace the parameters by their means over all ranks."""
        if self._mean is not None:
            self._mean.run()

    def hand_out(self) -> None:
        """Give the parameters the values of the outer parameters."""
        for run, outer in zip(self.runs, self.outer):
            run.copy_(outer)


class OuterStep:
    """Mixing of DiLoCo: one fragment takes its outer step in each exchange."""

    def __init__(self, peers: Peers, arena: ParameterBuffer, algorithm: DiLoCo) -> None:
        algorithm.check_fragments(max(arena.segment_count, 1))
        self._peers, self._arena, self._algorithm = peers, arena, algorithm
        count = algorithm.fragments
        members = [[run for segment, run in arena.runs if fragment_of(segment, count) == one] for one in range(count)]
        self._fragments = [_Fragment(peers, runs, number) for number, runs in enumerate(members)]
        self._begun = False

    @torch.no_grad()
    def begin(self) -> None:
        """Start from the parameters of the first rank, also where ranks have given different ones."""
        if self._begun:
            return
        self._arena.adopt()
        self._peers.judge(self._arena.names, self._arena.tensors)
        first = (self._peers.process_set.ranks or [0])[0]
        for number, (_, run) in enumerate(self._arena.runs):
            broadcast_(run, first, f"{self._peers.name}.begin.{number}", self._peers.process_set)
        self.all_are_alike()

    @torch.no_grad()
    def all_are_alike(self) -> None:
        # After a loss this object is new, with momentum 0, because some ranks may have taken an outer step that others
        # have not.
        self._arena.adopt()
        for fragment in self._fragments:
            for run, outer in zip(fragment.runs, fragment.outer):
                outer.copy_(run)
        self._begun = True

    @torch.no_grad()
    def exchange(self, round: int) -> None:
        fragment = self._fragments[round % len(self._fragments)]
        fragment.average()
        rate, factor = self._algorithm.rate, self._algorithm.momentum
        for mean, outer, momentum in zip(fragment.runs, fragment.outer, fragment.momentum):
            if factor == 0:
                outer.lerp_(mean.to(outer.dtype), rate)  # exactly the mean for a rate of 1
                continue
            change = mean - outer
            momentum.mul_(factor).add_(change)
            if self._algorithm.nesterov:
                outer.add_(change, alpha=rate).add_(momentum, alpha=rate * factor)
            else:
                outer.add_(momentum, alpha=rate)
        fragment.hand_out()

    def flush(self) -> None:
        pass

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put the outer parameters into the model within the block, if training has begun."""
        if not self._begun:
            yield
            return
        self._arena.adopt()
        with torch.no_grad():
            own = [run.clone() for _, run in self._arena.runs]
            for fragment in self._fragments:
                fragment.hand_out()
        try:
            yield
        finally:
            self._arena.adopt()
            with torch.no_grad():
                for (_, run), before in zip(self._arena.runs, own):
                    run.copy_(before)

    def state(self) -> dict[str, Any]:
        if not self._begun:
            return {}
        return {
            "outer": [one.clone() for fragment in self._fragments for one in fragment.outer],
            "momentum": [one.clone() for fragment in self._fragments for one in fragment.momentum],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        targets = [
            [one for fragment in self._fragments for one in fragment.outer],
            [one for fragment in self._fragments for one in fragment.momentum],
        ]
        saved = [state.get("outer", []), state.get("momentum", [])]
        shapes = [[(one.dtype, one.shape) for one in ones] for ones in (*targets, *saved)]
        # If the state is of other parameters, `begin` starts anew from the current ones.
        self._begun = shapes[0] == shapes[2] and shapes[1] == shapes[3]
        if self._begun:
            for target, value in zip((*targets[0], *targets[1]), (*saved[0], *saved[1])):
                target.copy_(value)
