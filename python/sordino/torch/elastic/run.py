"""Decorator that repeats a training function after faults until it returns.

  end of func(state, ...)     next
  returns                     return its result
  UsageError, NotBuilt,
  Unwritable                  raise it, because it would only recur, and the other ranks may not know of it
  SordinoError                form a world of the remaining ranks, reset, rejoin with undo, sync, call func again
  HostsUpdatedInterrupt       let newcomers join and others leave, reset, rejoin without undo, sync, call func again

A process that joins a running job does so before its first rejoin.

Before each call of func, the ranks wait for others while there are fewer than SORDINO_MIN_RANKS. Newcomers join
meanwhile.

More than `reset_limit` repetitions after a SordinoError end the run. A HostsUpdatedInterrupt does not count.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

from sordino.errors import NotBuilt, SordinoError, Unwritable, UsageError
from sordino.log import logger
from sordino.rendezvous.environment import MIN_RANKS
from sordino.runtime.collectives.objects import allgather_object
from sordino.runtime.context import current
from sordino.runtime.recovery.growth import admit, join
from sordino.runtime.recovery.losses import go_on_after
from sordino.torch.elastic.state import HostsUpdatedInterrupt, State

_log = logger(__name__)
_LOOK_S = 0.1
Result = TypeVar("Result")
Trains = Callable[..., Result]


@overload
def run(func: Trains[Result]) -> Trains[Result]: ...


@overload
def run(*, reset_limit: int | None = 100) -> Callable[[Trains[Result]], Trains[Result]]: ...


def run(func: Trains[Any] | None = None, *, reset_limit: int | None = 100) -> Any:
    """Decorate a training function `func(state, ...)`, whose first argument is a `State`.

    The state is synchronized and the function called. After a `HorovodInternalError` the remaining ranks form a new
    world, go back to the last commit, call the state's reset callbacks, synchronize it, and call the function again.
    After a `HostsUpdatedInterrupt` they do the same, without going back. Wrong arguments (`UsageError`), missing
    features (`NotBuilt`) and full disks (`Unwritable`) would only recur, so they end the run.

    Args:
        func: the function. All ranks call it with states that have the same attributes.
        reset_limit: largest number of repetitions after a `HorovodInternalError`, in total. The next one ends the run.
            None: no limit. Repetitions after a `HostsUpdatedInterrupt` do not count.

    Raises:
        UsageError: the first argument is not a state, or `reset_limit` is negative.
        SordinoError: there were too many resets. Or the original error, if the ranks cannot continue without the lost
            ones: with `init(on_peer_lost="raise")`, or if too few remain.
    """
    if reset_limit is not None and reset_limit < 0:
        raise UsageError(f"elastic.run(reset_limit={reset_limit}): must be at least 0, or None")
    if func is None:
        return functools.partial(run, reset_limit=reset_limit)
    return _repeated(func, reset_limit, None)


def run_fn(func: Trains[Result], reset: Callable[[], Any]) -> Trains[Result]:
    """Decorate like `run(func)`, with a function `reset` that is called before each repetition.

    It is called on all remaining ranks, when they have formed a new world. So it need not call shutdown and init.
    """
    return _repeated(func, 100, reset)


def _repeated(func: Trains[Result], reset_limit: int | None, reset: Callable[[], Any] | None) -> Trains[Result]:
    @functools.wraps(func)
    def repeat(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise UsageError(
                f"{func.__name__}() is decorated by elastic.run and needs a state, such as TorchState(model, "
                f"optimizer), as its first argument, not a {type(state).__name__}"
            )
        if current().newcomer is not None:
            join(current(), state.layout())
        cause: SordinoError | HostsUpdatedInterrupt | None = None
        faults = 0
        while True:
            if isinstance(cause, SordinoError):
                faults += 1
                _check_limit(faults, reset_limit, cause)
                go_on_after(current(), cause)
            try:
                if isinstance(cause, HostsUpdatedInterrupt) and admit(current(), state.layout(), state.leaves):
                    state.stay()
                if cause is not None and reset is not None:
                    reset()
                state.rejoin(undo=isinstance(cause, SordinoError))
                if cause is not None:
                    _tell(faults, cause)
                    state.on_reset()
                state.sync()
                current().losses.unsettled = False
                _wait_for_enough(state)
                _let_go(cause)
                return func(state, *args, **kwargs)
            except (UsageError, NotBuilt, Unwritable):
                raise
            except (SordinoError, HostsUpdatedInterrupt) as error:
                cause = error

    return repeat


def _wait_for_enough(state: State) -> None:
    """Wait while there are too few ranks. Collective. Raises HostsUpdatedInterrupt when others want to join."""
    text = os.environ.get(MIN_RANKS, "1")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{MIN_RANKS}={text!r} is not a number of ranks, from 1; correct it or unset it")
    # A process that joined the job may have another value, but all ranks must wait for the same number.
    least = max(allgather_object(int(text)))
    if current().size < least and current().rank == 0:
        _log.warning("training waits, because there are %d ranks and %s=%d", current().size, MIN_RANKS, least)
    while current().size < least:
        time.sleep(_LOOK_S)
        state.check_host_updates()


def _check_limit(faults: int, limit: int | None, cause: Exception) -> None:
    if limit is not None and faults > limit:
        raise SordinoError(
            f"elastic.run: {faults} faults, but reset_limit={limit}. The last fault was {type(cause).__name__}: "
            f"{cause}. If the faults were independent losses, raise reset_limit"
        ) from cause


def _let_go(cause: BaseException | None) -> None:
    """Let go of the local variables of the calls that raised an error, such as batches and the last call's graph."""
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


def _tell(faults: int, cause: Exception) -> None:
    context = current()
    if context.rank == 0:
        number = f"fault {faults}: " if isinstance(cause, SordinoError) else ""
        _log.warning("%s%d ranks continue after %s: %s", number, context.size, type(cause).__name__, cause)
