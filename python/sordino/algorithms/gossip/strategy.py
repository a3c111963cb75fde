"""Strategy for gossip: steps on local gradients, then mixes parameters with those of a few peers.

The algorithm chooses the peers, mixing.py changes a rank's parameters, and the core sends and averages. The exchanges
of a process set run on a separate set of their own, in the order of the calls, without a coordinator.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sordino.algorithms.exchanging import ExchangingStrategy
from sordino.algorithms.gossip import AveragingGossip, Gossip
from sordino.algorithms.gossip.compressed import MixingStatistics
from sordino.algorithms.gossip.mixing import Mixing, OuterMixing, Peers
from sordino.algorithms.strategy import Closure
from sordino.errors import UsageError
from sordino.runtime.exchange.flat_buffer import ParameterBuffer
from sordino.runtime.exchange.groups import channel_of, group_of
from sordino.runtime.process_set import ProcessSet


class GossipStrategy(ExchangingStrategy):
    """Strategy for gossip algorithms."""

    algorithm: Gossip
    asked: Gossip
    mixes_buffers = True
    """Whether buffers are mixed like parameters; otherwise `_mix` of the subclass exchanges them."""

    def prepare(self) -> None:
        self._arena: ParameterBuffer | None = None
        self._mixing: Mixing | None = None
        self._loaded: dict[str, Any] = {}  # state for the mixing, until `attach` creates it
        self._statistics = MixingStatistics()

    def attach(self) -> None:
        context, algorithm, workers = self.context, self.algorithm, self.settings.process_set
        ranks = workers.ranks or []
        buffers = len(self.buffers) if self.mixes_buffers else 0
        count = len(self.trained) + buffers
        names, tensors = self.exchanged_names[:count], self.exchanged[:count]
        arena = ParameterBuffer(context, names, tensors, algorithm.cut, algorithm.weighted, buffers, self.names)
        name = context.names.plan(f"gossip.{arena.layout.hash:x}", workers.process_set_id)
        channel = channel_of(context, workers)
        channel.compare([arena])
        place = ranks.index(context.rank)
        peers = Peers(context, workers, channel, name, place, self.settings.judge, self._statistics)
        mixing = algorithm.mixing(peers, arena)
        mixing.load_state(self._loaded)
        if self.asked.workers_in_group > 1:
            self.reduce_within(group_of(context, workers, algorithm.workers_in_group))
        self._steps_here = not algorithm.leaders_only or place % algorithm.workers_in_group == 0
        self._arena, self._mixing, self._every = arena, mixing, algorithm.every
        self._loaded = {}  # only now, because a loss may interrupt this method
        self.parts = f"{arena.segment_count} segment{'s' * (arena.segment_count != 1)}"

    @property
    def replicas(self) -> ProcessSet | None:
        return None if self.algorithm.leaders_only else super().replicas  # members get their leader's model anyway

    @property
    def optional_state(self) -> frozenset[str]:
        return self.algorithm.optional_state

    @property
    def statistics(self) -> Any:
        encodes = isinstance(self.algorithm, AveragingGossip) and self.algorithm.codec is not None
        return self._statistics if encodes else super().statistics

    def drain(self, optimizer: torch.optim.Optimizer) -> None:
        if self._mixing is not None and self._arena is not None:
            self._arena.adopt()
            self._mixing.flush()
            self._arena.give_back()

    def state_dict(self) -> dict[str, Any]:
        mixing = self._loaded if self._mixing is None else self._mixing.state()
        return {**super().state_dict(), **mixing}

    def carried_state(self) -> dict[str, Any]:
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        loaded = {key: value for key, value in state.items() if key not in ("steps", "round")}
        if self._mixing is None:
            self._loaded = loaded
        else:
            self._mixing.load_state(loaded)

    def forget_loaded(self) -> None:
        self._loaded = {}

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._mixing is not None
        self._mixing.begin()

    def level(self, tensors: list[torch.Tensor]) -> None:
        super().level(tensors)
        assert self._mixing is not None
        self._mixing.all_are_alike()

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        if closure is not None and self.algorithm.leaders_only and not self.settings.evaluates_once:
            raise UsageError(
                f"{self.algorithm.label}(within='leader'): {type(optimizer).__name__} may evaluate the closure of "
                "step() several times, each time with other parameters, which only the leader of a group has. Use "
                "within='allreduce', in which all members step"
            )
        stepping = optimizer if self._steps_here else _Standing(optimizer)
        return super().step_optimizer(stepping, closure, synchronize)  # type: ignore[arg-type]

    def after_step(self) -> None:
        assert self._arena is not None and self._mixing is not None
        self.steps += 1
        if self.steps % self._every == 0:
            self._arena.adopt()
            apart = [] if self.mixes_buffers else [buffer for _, buffer in self.buffers]
            self.exchange([*(run for _, run in self._arena.runs), *apart], self._mix)
            self._arena.give_back()

    def _mix(self) -> None:
        assert self._arena is not None and self._mixing is not None
        if self.settings.finite is not None:
            self.settings.judge(self._arena.names, self._arena.tensors)
        self._mixing.exchange(self.round)


class OuterStrategy(GossipStrategy):
    """Strategy for algorithms whose exchange is an outer step: it can show the outer parameters."""

    _mixing: OuterMixing | None

    def outer_parameters(self) -> AbstractContextManager[None]:
        # There is no mixing before the first step, or without other ranks.
        return nullcontext() if self._mixing is None else self._mixing.outer_parameters()


class _Standing:
    """Stand-in for the optimizer of a rank whose leader takes the steps. It only evaluates the closure."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Closure = None) -> Any:
        return None if closure is None else closure()
