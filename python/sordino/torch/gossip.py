"""Gossip in an optimizer: step on one's own gradients, then mix the parameters with those of a few other workers.

What is mixed with whom is the algorithm's to say (`sordino.algorithms.gossip`), what that does to a rank's parameters
is `sordino.torch.mixing`'s; moving and averaging is the core's. The exchanges of a process set run on a set of their
own, in the order of the calls, with no rank that coordinates them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sordino.algorithms import ElasticAveraging, GossipAlgorithm, PushSum
from sordino.torch.groups import channel_of, group_of
from sordino.torch.mixing import Meeting, Mixing, mixing_of
from sordino.torch.parameters import ParameterArena
from sordino.torch.process_sets import ProcessSet
from sordino.torch.steps import ParameterSteps


class GossipSteps(ParameterSteps):
    """What makes the steps of an optimizer those of a gossip algorithm."""

    algorithm: GossipAlgorithm
    _asked: GossipAlgorithm

    def _set_up(self) -> None:
        self._arena: ParameterArena | None = None
        self._mixing: Mixing | None = None
        self._loaded: dict[str, Any] = {}  # of the mixing, before there is one

    def _meet(self) -> None:
        context, algorithm, everybody = self.context, self.algorithm, self.settings.process_set
        ranks = everybody.ranks or []
        segments = "model" if isinstance(algorithm, ElasticAveraging) else algorithm.segments
        arena = ParameterArena(
            context,
            self.names + [f"buffer {name}" for name, _ in self.buffers],
            self.parameters + [buffer for _, buffer in self.buffers],
            segments,
            weighted=isinstance(algorithm, PushSum),
        )
        name = context.plan_name(f"gossip.{arena.layout.hash:x}", everybody.process_set_id)
        channel = channel_of(context, everybody)
        channel.compare([arena])
        place = ranks.index(context.rank)
        meeting = Meeting(context, everybody, channel, name, place, self.settings.judge)
        mixing = mixing_of(meeting, arena, algorithm)
        mixing.load_state(self._loaded)
        if self._asked.workers_in_group > 1:
            self._reduce_within(group_of(context, everybody, algorithm.workers_in_group))
        self._steps_here = not algorithm.leaders_only or place % algorithm.workers_in_group == 0
        self._arena, self._mixing = arena, mixing

    @property
    def _replicas(self) -> ProcessSet | None:
        return None if self.algorithm.leaders_only else super()._replicas  # leaders hand their model out

    def flush(self, optimizer: torch.optim.Optimizer) -> None:
        if self._mixing is not None and self._arena is not None:
            self._arena.adopt()
            self._mixing.flush()

    def state(self) -> dict[str, Any]:
        mixing = self._loaded if self._mixing is None else self._mixing.state()
        return {"steps": self.steps, "round": self.round, **mixing}

    def _carried(self) -> dict[str, Any]:
        return {"steps": self.steps, "round": self.round}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps, self.round = state["steps"], state["round"]
        self._loaded = {key: value for key, value in state.items() if key not in ("steps", "round")}
        if self._mixing is not None:
            self._mixing.load_state(self._loaded)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._mixing is not None
        self._mixing.begin()

    def _level(self, tensors: list[torch.Tensor]) -> None:
        super()._level(tensors)
        assert self._mixing is not None
        self._mixing.all_are_alike()

    def _step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, synchronize: bool) -> Any:
        stepping = optimizer if self._steps_here else _Standing(optimizer)
        return super()._step(stepping, closure, synchronize)  # type: ignore[arg-type]

    def after_step(self) -> None:
        if not self.active:
            return
        assert self._arena is not None and self._mixing is not None
        self.steps += 1
        if self.steps % self.algorithm.interval == 0:
            self._arena.adopt()
            self.exchange([run for _, run in self._arena.runs], self._mix)

    def _mix(self) -> None:
        assert self._arena is not None and self._mixing is not None
        self.settings.judge(self._arena.names, self._arena.tensors)
        self._mixing.exchange(self.round)


class _Standing:
    """In place of the optimizer of a rank that leaves stepping to its leader: evaluates a closure, changes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()
