"""Claims: each parameter belongs to at most one living `DistributedOptimizer`, and only that one steps it.

A second wrapper would reduce the same gradients at the same time, and so would DistributedDataParallel. A bare
optimizer would take steps in which other ranks do not take part. Making or calling one of these raises an error.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import sordino
from sordino.errors import StepOrderError, UsageError

_PACKAGE = str(Path(sordino.__file__).parent)

_claims: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()
"""Claims by the id() of a parameter. The claim keeps the parameter alive."""
_changing = threading.RLock()


class Claim:
    """Parameters of one `DistributedOptimizer`, for its lifetime.

    Attributes:
        open: whether the wrapped optimizer may step now.
        steps: number of steps of the `DistributedOptimizer`.
        keys: the id() of each parameter.

    Args:
        optimizer: the wrapped optimizer.
        names: names of its parameters.

    Raises:
        UsageError: one of the parameters belongs to another living wrapper, or to DistributedDataParallel.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> None:
        self._optimizer, self._names = optimizer, names
        self._where = _caller()
        self.open = False
        self.steps = 0
        self._groups: list[list[torch.Tensor]] = []
        self.keys: set[int] = set()
        _refuse_ddp(list(chain.from_iterable(_groups_of(optimizer))), names, self._where)
        self.take(names)
        _watch_others()

    def take(self, names: dict[torch.Tensor, str]) -> None:
        """Claim the optimizer's current parameters, and release all others.

        Args:
            names: names of its parameters.
        """
        groups = _groups_of(self._optimizer)
        parameters = list(chain.from_iterable(groups))
        with _changing:
            if self._rival(parameters) is not None:
                gc.collect()  # a dropped wrapper may be part of a reference cycle
            rival = self._rival(parameters)
            if rival is not None:
                parameter, other = rival
                raise UsageError(
                    f"the parameter '{other._names[parameter]}' belongs to the DistributedOptimizer made at "
                    f"{other._where}, which is still alive. A second one, made at {self._where}, would reduce its "
                    "gradients twice. Delete the first one before (del optimizer, and all references to it: "
                    "schedulers, and the traceback of an exception, which sys.last_value keeps), or wrap an optimizer "
                    "of a new model"
                )
            _forget(self.keys)
            self.keys.update(map(id, parameters))
            _claims.update(dict.fromkeys(self.keys, self))
            self._groups, self._names = groups, names

    def _rival(self, parameters: Iterable[torch.Tensor]) -> tuple[torch.Tensor, Claim] | None:
        """Return a parameter that belongs to another claim, with that claim; or None."""
        for parameter in parameters:
            other = _claims.get(id(parameter))
            if other is not None and other is not self:
                return parameter, other
        return None

    def release(self) -> None:
        """Release all parameters."""
        with _changing:
            _forget(self.keys)

    def has_changed(self) -> bool:
        """Return whether the optimizer's parameters differ from the claimed ones."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            return True
        for group, known in zip(groups, self._groups):
            parameters = group["params"]
            if len(parameters) != len(known) or not all(map(is_, parameters, known)):
                return True
        return False

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Allow the wrapped optimizer to step within the block."""
        before, self.open = self.open, True
        try:
            yield
        finally:
            self.open = before


def _groups_of(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _forget(keys: set[int]) -> None:
    while keys:
        _claims.pop(keys.pop(), None)


def _caller() -> str:
    """Return the file and line of the call into the library."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# ---- steps outside of step() ---------------------------------------------------------------------------------------


_others: dict[int, tuple[weakref.ref[Claim], int]] = {}
"""Other optimizers that are stepping claimed parameters, by their id(): the claim, and its number of steps before. A
step that raises leaves its entry."""


def _before_step(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    """Refuse a step of the wrapped optimizer outside of its wrapper's step, and note steps of other optimizers."""
    references = _claims.data  # type: ignore[attr-defined]  # itself, as a look-up of each parameter in a WeakValueDictionary takes too long
    for group in optimizer.param_groups:
        first = next(filter(None, map(references.get, map(id, group["params"]))), None)
        claim = None if first is None else first()
        if claim is None or claim.open:
            continue
        if claim._optimizer is optimizer:
            raise StepOrderError(_BARE.format(type(optimizer).__name__, claim._where))
        _others[id(optimizer)] = weakref.ref(claim), claim.steps
        return


def _after_step(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    """Raise if another optimizer has stepped claimed parameters without the wrapper's step() (Lookahead calls it)."""
    found, before = _others.pop(id(optimizer), (None, 0)) if _others else (None, 0)
    claim = None if found is None else found()
    if claim is not None and claim.steps == before:
        raise StepOrderError(_BARE.format(type(optimizer).__name__, claim._where))


_BARE = (
    "step() of an unwrapped {}, whose parameters belong to the DistributedOptimizer made at {}: other ranks do not "
    "take part in it. Call step() of the DistributedOptimizer. An optimizer that takes several steps in one, such as "
    "SAM, needs a closure: optimizer.step(closure)"
)


# ---- DistributedDataParallel ---------------------------------------------------------------------------------------

_BESIDE = (
    "the parameter '{name}' belongs to the DistributedOptimizer made at {ours} and to DistributedDataParallel{theirs}: "
    "both would average its gradients, in the same memory. Use only one of them: remove DistributedDataParallel "
    "(docs/coming-from-ddp.md)"
)


def _refuse_ddp(parameters: Sequence[torch.Tensor], names: dict[torch.Tensor, str], where: str) -> None:
    """Raise UsageError if one of the parameters belongs to a living DistributedDataParallel."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if _in_ddp(parameters) is not None:
        gc.collect()  # a dropped wrapper may be part of a reference cycle
    parameter = _in_ddp(parameters)
    if parameter is not None:
        raise UsageError(_BESIDE.format(name=names[parameter], ours=where, theirs=""))


def _in_ddp(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one of the parameters that belongs to a DistributedDataParallel, or None."""
    mine = {id(parameter): parameter for parameter in parameters}
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel) and "_modules" in vars(found):
            for parameter in found.parameters():
                if id(parameter) in mine and parameter.requires_grad:
                    return mine[id(parameter)]
    return None


_plain_init: Callable[..., None] = DistributedDataParallel.__init__


@wraps(_plain_init)
def _watched_init(ddp: DistributedDataParallel, module: torch.nn.Module, *arguments: Any, **keywords: Any) -> None:
    for name, parameter in module.named_parameters():
        claim = _claims.get(id(parameter))
        if claim is not None and parameter.requires_grad:
            raise UsageError(_BESIDE.format(name=name, ours=claim._where, theirs=f" made at {_caller()}"))
    _plain_init(ddp, module, *arguments, **keywords)


def _watch_others() -> None:
    """Refuse steps of bare optimizers, and DistributedDataParallel, from now on."""
    global _watching
    with _changing:
        if _watching:
            return
        _watching = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        DistributedDataParallel.__init__ = _watched_init  # type: ignore[method-assign,assignment]


_watching = False
