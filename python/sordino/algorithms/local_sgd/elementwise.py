"""Check that an optimizer may step slices of parameters, because it treats every element independently.

Optimizers known to be element-wise are allowed, and optimizers that the user declares element-wise (elementwise=True).
The first step of a declared optimizer is tried on copies, whole and in slices.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from sordino.algorithms import LocalSGD
from sordino.algorithms.local_sgd.sharded_state import gather_state, in_memory_order
from sordino.algorithms.local_sgd.sharding import ShardedReducer
from sordino.errors import UsageError
from sordino.fingerprint import rank_list
from sordino.runtime.collectives.autograd import allreduce
from sordino.runtime.collectives.objects import allgather_object
from sordino.runtime.collectives.operation import Max
from sordino.runtime.devices import HOST
from sordino.runtime.process_set import ProcessSet

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_ROUNDING = 8  # allowed difference between a vectorized loop and its scalar remainder, in epsilons of the change
_NAMED = 8  # most parameters that an error names


def require_elementwise(optimizer: torch.optim.Optimizer, algorithm: LocalSGD) -> None:
    """Raise UsageError for an optimizer whose change of an element may depend on other elements."""
    cls = type(optimizer)
    if cls in _ELEMENTWISE or algorithm.elementwise:
        return
    names = ", ".join(known.__name__ for known in _ELEMENTWISE)
    raise UsageError(
        f'LocalSGD(exchange="sharded") steps slices of parameters, so it needs an element-wise optimizer. Known to be '
        f"element-wise are {names}. If {cls.__name__} is, too, give elementwise=True, which is checked in the first "
        'step; otherwise use exchange="allreduce"'
    )


class Trial:
    """Comparison of an optimizer's step on slices with its step on whole parameters, on copies of both.

    Args:
        reducer: reducer with the slices that the optimizer steps.
        workers: the ranks that take the step.
    """

    def __init__(self, reducer: ShardedReducer, workers: ProcessSet) -> None:
        self._reducer, self._workers = reducer, workers

    def conclusive(self, optimizer: torch.optim.Optimizer) -> bool:
        """Try the coming step, for which all ranks of the group must have all gradients. Collective.

        Returns:
            False if the step would change no parameter on any rank, as with a learning rate of 0.

        Raises:
            UsageError: on some rank a slice would differ from the same part of the whole. Raised on all ranks.
        """
        reducer = self._reducer
        numbers = {id(parameter): i for i, parameter in enumerate(reducer.parameters)}
        state = gather_state(optimizer, reducer)["state"]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        of_whole = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        of_whole |= {parameter: state[index] for index, parameter in enumerate(parameters) if index in state}
        whole = _stepped(optimizer, of_whole)
        slices = reducer.slices()
        moved, wrong, refusal = False, [], ""
        parts: dict[int, torch.Tensor] = {}
        with reducer.on_slices(optimizer):
            try:
                parts = _stepped(optimizer, optimizer.state)
            except Exception as error:  # of the optimizer, which refuses slices
                refusal = f" ({type(error).__name__}: {error})"
                wrong = [reducer.names[number] for number in slices]
        for parameter in parameters if not refusal else ():
            number = numbers[id(parameter)]
            if number not in slices:
                continue
            piece = slices[number]
            wanted = in_memory_order(whole[id(parameter)].detach())[piece.begin : piece.end]
            found = parts[id(piece.values)].detach()
            before = piece.values.detach()
            change = _norm(wanted, before)
            moved = moved or change > 0
            epsilon = torch.finfo(wanted.dtype).eps
            slack = epsilon * (_ROUNDING * change + max(_norm(wanted), _norm(before)))
            if _norm(found, wanted) > slack:
                wrong.append(reducer.names[number])
        verdict = torch.tensor([2 if wrong else int(moved)], device=HOST)
        verdict = allreduce(verdict, op=Max, name="local.elementwise", process_set=self._workers)
        if int(verdict) == 2:
            raise self._error(type(optimizer).__name__, wrong, refusal)
        return int(verdict) == 1

    def _error(self, name: str, wrong: list[str], refusal: str) -> UsageError:
        """Return the findings of all ranks as an error. Collective.

        Args:
            name: the name of the optimizer.
            wrong: parameters whose slices on this rank would differ from the whole.
            refusal: the error that the optimizer raised on slices; "" if it has stepped them.
        """
        mine = wrong[:_NAMED], refusal
        gathered = allgather_object(mine, name="local.elementwise.wrong", process_set=self._workers)
        ranks = [rank for rank, (names, _) in zip(self._workers.ranks or [], gathered) if names]
        names = ", ".join(dict.fromkeys(name for some, _ in gathered for name in some))
        refusal = next((words for _, words in gathered if words), "")
        return UsageError(
            f"LocalSGD(elementwise=True): {name} is not element-wise. On {rank_list(ranks)} a step on slices differs "
            f"from a step on whole parameters: {names}{refusal}. Nothing was changed; use "
            'exchange="allreduce"'
        )


@torch.no_grad()
def _norm(values: torch.Tensor, others: torch.Tensor | None = None) -> float:
    """Return the 2-norm of values or of differences. Non-finite elements prove nothing, so they count as 0."""
    found = values.double() if others is None else values.double() - others.double()
    return float(torch.linalg.vector_norm(torch.nan_to_num(found, 0.0, 0.0, 0.0)))


def _stepped(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> dict[int, torch.Tensor]:
    """Return copies of the optimizer's parameters after a step of a copy of it, by `id()` of the parameters.

    Args:
        optimizer: the original, which does not change.
        state: the optimizer's state, by parameter.
    """
    # deepcopy would not do: an optimizer's pickle has only state and groups, and schedulers give the optimizer a step()
    # that is bound to the original.
    twin = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin}
    copies: dict[int, torch.Tensor] = {}
    states: dict[Any, Any] = defaultdict(dict)
    for key, value in state.items():
        if not isinstance(key, torch.Tensor):  # an entry that belongs to no parameter
            states[key] = copy.deepcopy(value, memo)
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            one = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            one.grad = None if parameter.grad is None else parameter.grad.clone()
            copies[id(parameter)] = memo[id(parameter)] = one
            if parameter in state:
                states[one] = copy.deepcopy(state[parameter], memo)
        groups.append({key: _copied(value, memo) for key, value in group.items()})
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state", "step"):
            twin.__dict__[name] = OrderedDict() if name.endswith("_hooks") else _copied(value, memo)
    twin.__dict__.update(param_groups=groups, state=states)
    devices = {one.device for one in copies.values() if one.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        twin.step()
    return copies


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy, or the value itself if it cannot be copied, such as a lock."""
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, NotImplementedError):
        return value
