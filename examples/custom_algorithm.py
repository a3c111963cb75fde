"""Example of an algorithm outside of Sordino's package: gossip of moving averages.

Every worker keeps an exponential moving average of its parameters. Every `interval` steps it averages this with one
random peer's, and draws its parameters towards the result. The values sent are smoother than the parameters.

  sordino run -np 4 -- python examples/train.py --algorithm custom_algorithm:EmaGossip --set interval=4
  PYTHONPATH=examples sordino simulate --algorithm custom_algorithm:EmaGossip --workers 8 --data none

docs/extending.md explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sordino.extend import (
    Algorithm,
    Copies,
    Exchange,
    ExchangingStrategy,
    FlatBuffer,
    Model,
    ParameterBuffer,
    Phase,
    RandomCycle,
    Runtime,
    Strategy,
    Traffic,
    Traits,
    groups_of,
    new_channel,
    require,
)


@dataclass(frozen=True)
class EmaGossip(Algorithm):
    """Gossip of moving averages: e = decay e + (1 - decay) w after every step; every `interval` steps e becomes the
    mean of this worker's e and one random peer's, and w = w + pull (e - w).

    Sent per exchange and worker: the bytes of the parameters, in one message. Staleness: none. Memory: the parameters
    once more. When a peer dies: as with every algorithm that exchanges parameters; the averages begin anew.

    Attributes:
        interval: optimizer steps between two exchanges.
        decay: fraction of the average that each step keeps, at least 0 and below 1.
        pull: how far an exchange moves the parameters towards the average, above 0 and up to 1.
        seed: seed of the draws of peers, the same on all ranks.
    """

    interval: int = 1
    decay: float = 0.9
    pull: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.interval >= 1, self, "interval", "must be at least 1")
        require(0 <= self.decay < 1, self, "decay", "must be at least 0 and below 1")
        require(0 < self.pull <= 1, self, "pull", "must be above 0 and at most 1")

    @property
    def traits(self) -> Traits:
        return Traits(sends_gradients=False)

    def strategy(self, runtime: Runtime) -> Strategy:
        return EmaStrategy(runtime, self)

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        workers, peers = groups_of(len(nodes), len(nodes)), RandomCycle(len(nodes), self.seed)
        exchange = Phase(
            lambda round, sent: [Exchange(workers, peers, [model.bytes], round, models=True)], self.interval
        )
        return Traffic([Phase([Copies(3 * model.bytes)]), exchange])  # each step reads both and writes the average


class EmaStrategy(ExchangingStrategy):
    """Strategy for `EmaGossip`."""

    algorithm: EmaGossip

    def prepare(self) -> None:
        self._saved: list[torch.Tensor] = []  # averages from a checkpoint
        self._begun = False

    def attach(self) -> None:
        workers = self.settings.process_set
        self._values = ParameterBuffer(self.context, self.exchanged_names, self.exchanged, "model")
        self._averages = FlatBuffer(self.context, self._values.layout, self._values.device)
        self._channel = new_channel(self.context, workers)
        self._channel.compare([self._averages])
        self._peers = RandomCycle(len(workers.ranks or []), self.algorithm.seed)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._begun:
            self._values.adopt()
            self._averages.copy_(self._values)
            means = [mean for _, mean in self._averages.runs]
            if [saved.shape for saved in self._saved] == [mean.shape for mean in means]:
                for mean, saved in zip(means, self._saved):
                    mean.copy_(saved)
            self._begun = True

    @torch.no_grad()
    def after_step(self) -> None:
        self.steps += 1
        self._values.adopt()  # other code may have moved a parameter to other memory
        for (_, mine), (_, mean) in zip(self._values.runs, self._averages.runs):
            mean.lerp_(mine, 1 - self.algorithm.decay)
        if self.steps % self.algorithm.interval == 0:
            self.exchange([run for buffer in (self._values, self._averages) for _, run in buffer.runs], self._mix)

    def _mix(self) -> None:
        self.settings.judge(self._values.names, self._values.tensors)  # with check_finite=True
        self._channel.start(f"ema.{self.round}", self._peers, self._averages, self.round, wait=True).wait()
        for (_, mine), (_, mean) in zip(self._values.runs, self._averages.runs):
            mine.lerp_(mean, self.algorithm.pull)

    def state_dict(self) -> dict[str, Any]:
        averages = [run.clone() for _, run in self._averages.runs] if self._begun else self._saved
        return {"steps": self.steps, "round": self.round, "averages": averages}

    def carried_state(self) -> dict[str, Any]:
        return {"steps": self.steps, "round": self.round, "averages": []}  # the remaining ranks have one model

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.round = state["steps"], state["round"]
        self._saved, self._begun = state["averages"], False
