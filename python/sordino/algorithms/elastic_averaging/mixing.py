"""Exchange of elastic averaging. It needs no peers, only an all-reduce."""

from __future__ import annotations

from typing import Any

import torch

from sordino.algorithms.elastic_averaging import ElasticAveraging
from sordino.algorithms.gossip.mixing import Peers, is_of
from sordino.runtime.collectives.operation import Average
from sordino.runtime.collectives.ops import grouped_allreduce_
from sordino.runtime.exchange.flat_buffer import FlatBuffer, ParameterBuffer
from sordino.runtime.exchange.memory_order import strided_in, to_memory_order, to_row_major


class ElasticMixing:
    """Mixing that moves every worker towards the center, and the center towards the mean of the workers."""

    def __init__(self, peers: Peers, arena: ParameterBuffer, algorithm: ElasticAveraging) -> None:
        self._peers = peers
        self._arena = arena
        self._rate = algorithm.moving_rate
        self._size = len(peers.process_set.ranks or [])
        self._centre = FlatBuffer(peers.context, arena.layout, arena.device)
        self._mean = FlatBuffer(peers.context, arena.layout, arena.device)
        self._begun = False
        self._strided = strided_in(arena)

    def begin(self) -> None:
        if not self._begun:
            self._arena.adopt()
            self._peers.judge(self._arena.names, self._arena.tensors)
            self._centre.copy_(self._average())
            self._begun = True

    def all_are_alike(self) -> None:
        # The center becomes the values that all ranks now have. Computing it in the next step (`begin`) could hang:
        # after a loss some ranks may be a step behind, so a rank could wait for ranks that take no further step.
        self._arena.adopt()
        self._centre.copy_(self._arena)
        self._begun = True

    @torch.no_grad()
    def exchange(self, round: int) -> None:
        mean = self._average()
        for (_, mine), (_, centre), (_, average) in zip(self._arena.runs, self._centre.runs, mean.runs):
            mine.lerp_(centre, self._rate / self._size)
            centre.lerp_(average, self._rate)

    def flush(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        if not self._begun:
            return {}
        centre = to_row_major([run for _, run in self._centre.runs], self._strided)
        return {"parameters": list(self._arena.plain_names), "centre": centre}

    def load_state(self, state: dict[str, Any]) -> None:
        saved = state.get("centre", [])
        shapes = [(run.dtype, run.shape) for _, run in self._centre.runs]
        # If the state is of other parameters, `begin` computes the center again.
        fits = [(run.dtype, run.shape) for run in saved] == shapes
        self._begun = fits and is_of(state, self._arena, "ElasticAveraging: the center's values")
        if self._begun:
            for (_, run), values in zip(self._centre.runs, to_memory_order(saved, self._strided)):
                run.copy_(values)

    def _average(self) -> FlatBuffer:
        self._mean.copy_(self._arena)
        runs = [run for _, run in self._mean.runs]
        name = f"{self._peers.name}.mean"
        if runs:  # none where all parameters are frozen
            grouped_allreduce_(runs, op=Average, name=name, process_set=self._peers.process_set)
        return self._mean
