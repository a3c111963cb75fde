"""Detection of NaN and Inf (`check_finite`): if some rank has them, all ranks refuse the step.

A sum is finite only if all its terms are, so a tensor is checked by its sum: one pass at the speed of memory. Two sets
of values are checked: values that a rank is about to send, so that an error can name the rank, and values that the
optimizer is about to use. If the latter are an average that all ranks share, all ranks find the same without
communication. Otherwise (`asks`) a flag is reduced before every step, so that no rank takes a step that others refuse.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sordino.errors import NonFinite, SordinoError, UsageError
from sordino.runtime.collectives.autograd import allreduce
from sordino.runtime.collectives.operation import Max, Sum
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST
from sordino.runtime.gradients.settings_check import SettingsCheck
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import stored_values

_NAMED = 8  # maximum number of tensors of each rank in an error
_WHAT = ("", "Inf", "NaN")


def largest_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value of each of some tensors of one dtype.

    On a GPU this is one pass over all tensors, and does not wait for the result.
    """
    return torch.stack(torch._foreach_norm(list(tensors), math.inf))


class Evidence:
    """Record of which tensors are not finite. `found` waits for results of a GPU.

    Args:
        numbers: number that identifies each tensor.
        tensors: the tensors, dense or sparse. Only floating-point tensors are checked.
    """

    def __init__(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        self._found: dict[int, int] = {}
        self._pending: list[tuple[list[int], torch.Tensor]] = []
        on_devices: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = defaultdict(list)
        with torch.no_grad():
            for number, tensor in zip(numbers, tensors):
                values = stored_values(tensor).detach()
                if not values.is_floating_point() or values.numel() == 0:
                    continue
                if values.device.type != "cpu":
                    on_devices[values.device, values.dtype].append((number, values))
                elif not math.isfinite(values.sum().item()):
                    self._note(number, max(map(abs, map(float, values.aminmax()))))  # sums of finite values overflow
            for entries in on_devices.values():
                largest = largest_of([values for _, values in entries])
                self._pending.append(([number for number, _ in entries], largest))

    def _note(self, number: int, largest: float) -> None:
        if not math.isfinite(largest):
            self._found[number] = _WHAT.index("NaN" if math.isnan(largest) else "Inf")

    @property
    def found(self) -> dict[int, int]:
        """Tensors that are not finite, by number: 1 for Inf, 2 for NaN."""
        for numbers, largest in self._pending:
            for number, value in zip(numbers, largest.tolist()):
                self._note(number, value)
        self._pending = []
        return self._found


def look(numbers: Sequence[int], tensors: Sequence[torch.Tensor | None]) -> Evidence:
    """Return evidence of which tensors are not finite. None counts as finite."""
    there = [(number, tensor) for number, tensor in zip(numbers, tensors) if tensor is not None]
    return Evidence([number for number, _ in there], [tensor for _, tensor in there])


class FiniteCheck:
    """Check that the gradients and parameters of one optimizer are finite.

    Args:
        context: the context of this rank.
        names: names of `parameters`.
        parameters: parameters whose gradients the optimizer uses.
        process_set: ranks that refuse a step together.
        check: check of the ranks' settings. The ranks have met before anything is checked.
        alone: whether this rank decides alone, because there are no other ranks or they do not wait for it.
        asks: whether ranks must ask each other, because they do not all use the same gradients.
        at_once: whether gradients are checked after their reduction, rather than before the optimizer's step.
    """

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        process_set: ProcessSet,
        check: SettingsCheck,
        alone: bool,
        asks: bool,
        at_once: bool,
    ) -> None:
        self._context = context
        self._names, self._parameters = list(names), list(parameters)
        self._process_set = process_set
        self._check = check
        self._alone, self._asks, self._at_once = alone, asks and not alone, at_once
        self.sent: list[Evidence] = []
        """Evidence about this rank's contribution to the gradients to be checked next; empty if nothing was sent."""

    # ---- gradients ---------------------------------------------------------------------------------------------

    def verdict(self, sent: Iterable[Evidence | None]) -> list[Exception]:
        """Record the evidence about this rank's contribution to gradients that have been reduced.

        Returns:
            the errors to raise, if gradients are checked at once; else none.
        """
        self.sent = [evidence for evidence in sent if evidence is not None]
        if not self._at_once:
            return []
        try:
            self.judge_gradients()
        except SordinoError as error:
            return [error]
        return []

    def judge_gradients(self) -> None:
        """Raise NonFinite on all ranks if the gradients of one rank are not finite. Collective."""
        gradients = look(range(len(self._parameters)), [parameter.grad for parameter in self._parameters])
        sent, self.sent = self.sent or [gradients], []
        mine = {number: code for evidence in sent for number, code in evidence.found.items()}
        if self._bad(bool(mine or gradients.found) if self._asks else bool(gradients.found), self._asks):
            raise self._error("gradients", self._names, mine, list(gradients.found), not self._alone)

    def guard(self, optimizer: Any, refused: Callable[[], None]) -> Any:
        """Return an optimizer whose step first checks the gradients.

        Args:
            optimizer: the optimizer that steps if the gradients are finite.
            refused: called before NonFinite is raised.
        """

        def judge() -> None:
            try:
                self.judge_gradients()
            except NonFinite:
                refused()
                raise

        return _Guarded(optimizer, judge, self._asks)

    def judge_changes(self, sent: Evidence | None, received: Evidence | None) -> None:
        """Raise NonFinite on all ranks if the reduced changes of parameters are not finite.

        Collective if it raises.

        Args:
            sent: evidence of the changes that this rank sent.
            received: evidence of the reduced changes, the same on all ranks.
        """
        found = received.found if received is not None else {}
        if found:
            mine = sent.found if sent is not None else {}
            raise self._error("changes of parameters", self._names, mine, list(found), not self._alone)

    # ---- parameters --------------------------------------------------------------------------------------------

    def judge_parameters(self, names: Sequence[str], tensors: Sequence[torch.Tensor], together: bool) -> None:
        """Raise NonFinite if parameters that are about to be exchanged are not finite.

        Collective if `together`, or if ranks ask each other anyway.
        """
        mine = look(range(len(names)), tensors).found
        if self._bad(bool(mine), together or self._asks):
            raise self._error("parameters", names, mine, [], together or self._asks)

    # ---- communication -----------------------------------------------------------------------------------------

    def _bad(self, mine: bool, asks: bool) -> bool:
        """Return whether this rank or, if it `asks`, any rank has found something. Collective if it asks."""
        if not asks:
            return mine
        flag = torch.tensor([int(mine)], dtype=torch.uint8, device=HOST)
        name = f"{self._check.name}.finite"
        return bool(allreduce(flag, op=Max, name=name, process_set=self._process_set).item())

    def _error(
        self,
        what: str,
        names: Sequence[str],
        mine: dict[int, int],
        results: Sequence[int],
        together: bool,
    ) -> NonFinite:
        """Return the error, with the findings of each rank. Collective if `together`."""
        tables = self._tell(mine) if together else {self._context.rank: mine}
        tensors = {
            rank: {names[number]: _WHAT[code] for number, code in table.items()} for rank, table in tables.items()
        }
        if tensors:
            said = "; ".join(
                f"rank {rank} has {', '.join(f'{code} in {name!r}' for name, code in found.items())}"
                for rank, found in tensors.items()
            )
        else:
            broken = [names[number] for number in results]
            said = (
                "the values of all ranks were finite, but their reduction overflowed in "
                f"{', '.join(map(repr, broken[:_NAMED]))}"
            )
        then = {
            "gradients": "No step was taken; call zero_grad(), and continue with the next batch.",
            "changes of parameters": "Parameters are those before the step, but the optimizer has counted the step.",
            "parameters": "Nothing was exchanged, but the optimizer's own step was taken: go back to a checkpoint.",
        }[what]
        return NonFinite(f"{what} are not finite: {said}. {then}", tensors)

    def _tell(self, mine: dict[int, int]) -> dict[int, dict[int, int]]:
        """Return the findings of all ranks, by rank. Collective.

        It uses a sum, to which ranks that have joined contribute zeros.
        """
        ranks = self._process_set.ranks or []
        table = torch.zeros(len(ranks), 2 * _NAMED, dtype=torch.int64, device=HOST)
        for place, (number, code) in enumerate(list(mine.items())[:_NAMED]):
            table[ranks.index(self._context.rank), 2 * place : 2 * place + 2] = torch.tensor(
                [number, code], device=HOST
            )
        name = f"{self._check.name}.finite.who"
        rows: list[list[int]] = allreduce(table, op=Sum, name=name, process_set=self._process_set).tolist()
        found = {rank: {n: code for n, code in zip(row[::2], row[1::2]) if code} for rank, row in zip(ranks, rows)}
        return {rank: table for rank, table in found.items() if table}


class _Guarded:
    """Wrapper of an optimizer that checks the gradients before a step."""

    def __init__(self, optimizer: Any, judge: Callable[[], None], asks: bool) -> None:
        self._optimizer, self._judge, self._asks = optimizer, judge, asks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            self._judge()
            return self._optimizer.step()
        if self._asks:
            raise UsageError(
                "check_finite=True asks all ranks before each step, but ranks may evaluate a closure different numbers "
                "of times; compute gradients before step(), or use AllReduce"
            )

        def judged() -> Any:
            loss = closure()
            self._judge()
            return loss

        return self._optimizer.step(judged)
