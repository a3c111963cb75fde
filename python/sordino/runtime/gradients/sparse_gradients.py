"""Sparse gradients, each of which is reduced by an operation of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sordino.errors import SordinoError
from sordino.runtime.collectives.operation import Average, Sum
from sordino.runtime.collectives.sparse import no_rows, sparse_allreduce_async
from sordino.runtime.gradients.nonfinite import Evidence
from sordino.runtime.gradients.settings import Settings


class SparseGradients:
    """Gradients of `parameters` that are reduced as sparse tensors, and their reductions in flight.

    Attributes:
        names: names of their operations, by the index of the parameter.
        in_flight: functions that wait for a reduction and return its result, by the index of the parameter.
        looked: evidence of the gradients sent last, with check_finite.

    Args:
        parameters: all parameters.
        settings: settings of the reduction.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], settings: Settings) -> None:
        self._parameters, self._settings = parameters, settings
        self.names: dict[int, str] = {}
        self.in_flight: dict[int, Callable[[], torch.Tensor]] = {}
        self.looked: dict[int, Evidence | None] = {}

    def start(self, index: int, suffix: str) -> None:
        """Start the reduction of a gradient. `suffix` is added to the name of the operation."""
        parameter = self._parameters[index]
        grad = parameter.grad
        if grad is None:
            grad = no_rows(parameter)
        elif not grad.is_sparse:
            grad = grad.to_sparse(1)
        self.looked[index] = self._settings.look([index], [grad])
        op = Sum if self._settings.op != Average else Average
        name = self.names[index] + suffix
        self.in_flight[index] = sparse_allreduce_async(grad, name, op, self._settings.process_set)

    def finish(self) -> list[Exception]:
        """Wait for all reductions in flight, and make their results the gradients. Return the errors."""
        failures: list[Exception] = []
        for index, wait in sorted(self.in_flight.items()):
            try:
                self._parameters[index].grad = wait()
            except SordinoError as error:
                failures.append(error)
        self.in_flight = {}
        return failures
