"""The outer step of NoLoCo, on the parameters of one rank.

An exchange averages one copy of the parameters over a group of workers (`OuterGossip.exchange`):

    message = θ + (pull - 1) φ      the copy that is sent; pull = γ / α
    message = mean(message)         over the group, by the core
    b = μ b + α (message - pull φ)
    φ = φ + b,  θ = φ

Parameters in 16 bits continue from the rounded φ, so the first and third formula use the rounded φ, too. Otherwise
rounding errors would count as changes.

The model is not changed before the mean is complete. So an exchange that fails leaves parameters, φ and b as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sordino.algorithms.gossip.mixing import Averaging, Peers, take_from_first
from sordino.algorithms.noloco import NoLoCo
from sordino.runtime.exchange.flat_buffer import FlatBuffer, ParameterBuffer
from sordino.runtime.parameter_names import finder


class _Parameter:
    """One parameter with its outer state.

    Attributes:
        own: the values that the model computes with, θ, in the arena.
        message: the values that are sent, and then their mean over a group.
        outer: outer parameters, φ; in float32 for 16-bit parameters, so that changes below a rounding error add up.
        momentum: the momentum, b.
        begun: whether `outer` has values.
    """

    def __init__(self, own: torch.Tensor, message: torch.Tensor) -> None:
        self.own, self.message = own, message
        self.outer = own.float() if own.element_size() < 4 else own.clone()
        self.momentum = torch.zeros_like(self.outer)
        self.begun = False

    def begin(self) -> None:
        """Start from the model's values, without momentum."""
        self.outer.copy_(self.own)
        self.momentum.zero_()
        self.begun = True

    def pack(self, pull: float) -> None:
        """Write the message to send."""
        self.message.copy_(self._packed(self.own, pull))

    def step(self, rate: float, factor: float, pull: float) -> None:
        """Take the outer step. The message contains the mean of the group's messages."""
        if self.own.dtype == self.outer.dtype:
            change = self.message - pull * self.outer
        else:  # relative to the message of a worker whose parameters have not moved, rounded in the same way
            still = self._packed(self._start, pull)
            change = self.message.to(self.outer.dtype) - still.to(self.outer.dtype)
        self.momentum.mul_(factor).add_(change, alpha=rate)
        self.outer.add_(self.momentum)
        self.own.copy_(self.outer)

    @property
    def _start(self) -> torch.Tensor:
        """The outer parameters as the model received them: rounded to its dtype."""
        return self.outer.to(self.own.dtype)

    def _packed(self, own: torch.Tensor, pull: float) -> torch.Tensor:
        return own if pull == 1 else torch.add(own, self._start, alpha=pull - 1)

    def takes(self, outer: Any, momentum: Any) -> bool:
        """Return whether these are tensors of the shape and dtype of this parameter's outer state."""
        return all(
            isinstance(one, torch.Tensor) and (one.shape, one.dtype) == (self.outer.shape, self.outer.dtype)
            for one in (outer, momentum)
        )


class OuterGossip(Averaging):
    """Mixing of NoLoCo: parameters take an outer step in each exchange, and buffers become their mean."""

    def __init__(self, peers: Peers, arena: ParameterBuffer, algorithm: NoLoCo) -> None:
        super().__init__(peers, arena, algorithm)
        self._algorithm = algorithm
        self._message = FlatBuffer(peers.context, arena.layout, arena.device)
        self._parameters: dict[str, _Parameter] = {}
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # values in the arena, and in the message
        tensors = zip(arena.plain_names, arena.tensors, arena.are_buffers, arena.layout.offsets)
        for name, tensor, is_buffer, offset in tensors:
            own, message = arena.like(tensor, offset), self._message.like(tensor, offset)
            if is_buffer:  # a statistic takes no outer step, which could make a variance negative
                self._buffers.append((own, message))
            else:  # even if it is frozen now, because it may be trained later
                self._parameters[name] = _Parameter(own, message)

    def begin(self) -> None:
        self._begin_new()
        super().begin()

    @torch.no_grad()
    def _begin_new(self) -> None:
        """Start from the parameters of the first rank, even if the ranks have different ones.

        Parameters that are added or unfrozen later start from each rank's own values.
        """
        new = [one for one in self._parameters.values() if not one.begun]
        if not new:
            return
        self.arena.adopt()
        if len(new) == len(self._parameters):
            self.peers.judge(self.arena.names, self.arena.tensors)
            self._message.copy_(self.arena)
            take_from_first(self.peers, self._message)
            for one in new:  # buffers stay as they are
                one.own.copy_(one.message)
        for one in new:
            one.begin()

    @torch.no_grad()
    def all_are_alike(self) -> None:
        super().all_are_alike()
        # After a loss the momentum restarts, because some ranks may have taken an outer step that others have not.
        self.arena.adopt()
        for one in self._parameters.values():
            one.begin()

    @torch.no_grad()
    def exchange(self, round: int) -> None:
        algorithm = self._algorithm
        for parameter in self._parameters.values():
            parameter.pack(algorithm.pull)
        for own, message in self._buffers:
            message.copy_(own)
        self.mix(round, self._message)
        for parameter in self._parameters.values():
            parameter.step(algorithm.outer_lr, algorithm.outer_momentum, algorithm.pull)
        for own, mean in self._buffers:
            own.copy_(mean)

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put this worker's outer parameters into the model within the block, if training has begun."""
        parameters = [one for one in self._parameters.values() if one.begun]
        with self.arena.restoring([one.own for one in parameters]):
            with torch.no_grad():
                for one in parameters:
                    one.own.copy_(one.outer)
            yield

    def state(self) -> dict[str, Any]:
        begun = {name: one for name, one in self._parameters.items() if one.begun}
        if not begun:
            return super().state()
        return {
            **super().state(),
            "outer": {name: one.outer.clone() for name, one in begun.items()},
            "momentum": {name: one.momentum.clone() for name, one in begun.items()},
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        saved = state.get("outer", {})
        outer_of, momentum_of = finder(saved), finder(state.get("momentum", {}))
        for name, one in self._parameters.items():
            outer: Any = outer_of(name)
            momentum: Any = momentum_of(name)
            # A parameter that the state does not have begins from the model's values in the next step (`begin`).
            one.begun = one.takes(outer, momentum)
            if one.begun:
                one.outer.copy_(outer)
                one.momentum.copy_(momentum)
        if saved and self._parameters and not any(one.begun for one in self._parameters.values()):
            warnings.warn(
                f"NoLoCo: the outer parameters in the state are of other parameters ('{next(iter(saved))}', for "
                "example), so they are not used: all workers begin from the first one's. named_parameters= has other "
                "names, or none",
                RuntimeWarning,
                stacklevel=2,
            )
