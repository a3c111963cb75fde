"""Sparse gradients, each of which is reduced by an operation of its own.

A rank without a gradient sends no rows. A gradient without rows, as from a batch without words, is different:
optimizers with momentum take a step with it. It is sent as a marker, one row of zeros with the index -1. So a result
without rows means that no rank had a gradient.
"""

from __future__ import annotations

import weakref
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
        unused: indices of the parameters for which no rank had a gradient in the last reductions.
        looked: evidence of the gradients sent last, with check_finite.

    Args:
        parameters: all parameters.
        settings: settings of the reduction.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], settings: Settings) -> None:
        self._parameters, self._settings = parameters, settings
        self.names: dict[int, str] = {}
        self.in_flight: dict[int, Callable[[], torch.Tensor]] = {}
        self.unused: set[int] = set()
        self.looked: dict[int, Evidence | None] = {}
        self._results: dict[int, weakref.ref[torch.Tensor]] = {}

    def start(self, index: int, suffix: str) -> None:
        """Start the reduction of a gradient. `suffix` is added to the name of the operation."""
        parameter = self._parameters[index]
        grad = parameter.grad
        if grad is None:
            sent = no_rows(parameter)
        else:
            sent = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
            if sent._nnz() == 0:
                sent = _marker(sent)
        self.looked[index] = self._settings.look([index], [sent])
        op = Sum if self._settings.op != Average else Average
        name = self.names[index] + suffix
        self.in_flight[index] = sparse_allreduce_async(sent, name, op, self._settings.process_set)

    def finish(self) -> list[Exception]:
        """Wait for all reductions in flight, and make their results the gradients. Return the errors.

        A gradient that no rank had stays None.
        """
        failures: list[Exception] = []
        self.unused, self._results = set(), {}
        for index, wait in sorted(self.in_flight.items()):
            try:
                found = wait()
            except SordinoError as error:
                failures.append(error)
                continue
            if found._nnz() == 0:
                self.unused.add(index)
            else:
                self._parameters[index].grad = found = _without_markers(found)
                self._results[index] = weakref.ref(found)
        self.in_flight = {}
        return failures

    def has_reduced(self) -> bool:
        """Return whether some parameter still has the gradient from the last reduction."""
        pairs = ((self._parameters[index].grad, kept()) for index, kept in self._results.items())
        return any(now is not None and now is reduced for now, reduced in pairs)


def _marker(gradient: torch.Tensor) -> torch.Tensor:
    """Return the marker that a rank sends for a gradient without rows."""
    index = gradient.indices().new_full((gradient.sparse_dim(), 1), -1)
    zeros = gradient.values().new_zeros(1, *gradient.values().shape[1:])
    return torch.sparse_coo_tensor(index, zeros, gradient.shape, check_invariants=False)


def _without_markers(found: torch.Tensor) -> torch.Tensor:
    """Return an uncoalesced tensor without the markers in it."""
    indices = found._indices()
    rows = indices[0] >= 0
    if rows.all():
        return found
    return torch.sparse_coo_tensor(indices[:, rows], found._values()[rows], found.shape, check_invariants=False)
