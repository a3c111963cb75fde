"""Going on without ranks that are lost: what was under way is either completed or repeated by all that are left, alike.

A `Lockstep` is what some ranks do together, in one order. Who has its results of one part of it tells the others, and
uses them only when all have said so. So after a loss, when those that are left compare their locksteps, a part of which
one of them knows that all have it, or which all of them have, is complete; of any other part nobody has used anything,
and all repeat it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from sordino._core import Request
from sordino.errors import (
    ConfigurationMismatch,
    Evicted,
    LayoutMismatch,
    NonFinite,
    NoQuorum,
    OperationMismatch,
    PeerLost,
    SordinoError,
    Timeout,
    TransportError,
)
from sordino.launch.telling import tell_of_the_lost
from sordino.log import logger
from sordino.runtime import opcode
from sordino.runtime.context import Context, Lockstep
from sordino.runtime.devices import HOST
from sordino.runtime.process_set import ProcessSet, register_again
from sordino.runtime.tensors import describe, from_result

_log = logger(__name__)
LOSSES = (PeerLost, Timeout, TransportError)
"""What may be the end of a world, and not that of its ranks."""
_OF_ALL = (OperationMismatch, ConfigurationMismatch, LayoutMismatch, NonFinite)  # what no rank raises alone
_FRUITLESS = 3  # times in a row that the ranks meet anew, and nobody is missing

Result = TypeVar("Result")


def nothing() -> None:
    """Undo what is to be undone where the same can be done twice: nothing."""


def together(
    context: Context,
    process_set: ProcessSet,
    work: Callable[[], Result],
    undo: Callable[[], None] = nothing,
    lockstep: Lockstep | None = None,
) -> Result:
    """Do `work()`, which communicates, so that it is completed or repeated by all ranks that are left.

    Args:
        context: of this rank.
        process_set: the ranks that do it.
        work: called again, in a smaller world, if a rank is lost before all have its results.
        undo: called before that; what `work` has changed must then be as it was.
        lockstep: that this is the next part of; by default that of all operations of these ranks.

    Raises:
        SordinoError: as `work`; where this rank cannot go on, NoQuorum or Evicted.
        UsageError: another thread of this rank is at a part of the same.
    """
    if context.is_plain:
        return work()
    if lockstep is None:
        lockstep = context.lockstep("operations", process_set)
    with lockstep.next(undo) as number:
        name_again = context.names_until_now()
        while True:
            epoch = context.epoch
            try:
                with context.plainly():
                    outcome = _outcome_of(work)
                    lockstep.arrived = number
                    _say_arrived(context, lockstep, number, process_set)
                context.fruitless = 0
                break
            except LOSSES as error:
                recover(context, error, epoch)
                if lockstep.through >= number:
                    break
                name_again()
        lockstep.committed = number
    return outcome()


def _outcome_of(work: Callable[[], Result]) -> Callable[[], Result]:
    """Return what `work()` comes to on all ranks: a result, or an error that all raise."""
    try:
        result = work()
    except _OF_ALL as error:
        refusal = error  # a name of its own: Python deletes the other at the end of the block

        def refuse() -> Result:
            raise refusal

        return refuse
    return lambda: result


def _say_arrived(context: Context, lockstep: Lockstep, number: int, process_set: ProcessSet) -> None:
    identity = process_set.process_set_id or 0
    name = f"{lockstep.key}.{number}.arrived"
    context.world.run(Request(opcode.BARRIER, name, [], process_set=identity)).wait()


def again(context: Context, work: Callable[[], Result]) -> Result:
    """Do `work()`, and again in a smaller world if a rank is lost in it.

    This is for what does not say that it has arrived: it may have been the last time for some ranks and not for others.
    """
    if context.is_plain:
        return work()
    name_again = context.names_until_now()
    while True:
        epoch = context.epoch
        try:
            with context.plainly():
                result = work()
            context.fruitless = 0
            return result
        except LOSSES as error:
            recover(context, error, epoch)
            name_again()


def recover(context: Context, error: SordinoError, epoch: int) -> None:
    """Have this rank go on in the world of those that are left.

    Collective over them: all come here when an operation of theirs fails, wherever they are.

    Args:
        context: of this rank; it adopts the next world.
        error: why the world of `epoch` has ended. It is raised again if that is the end for all of its ranks.
        epoch: of the context, when what has failed began. Nothing is to be done if it is another one by now.

    Raises:
        NoQuorum, Evicted: this rank cannot go on.
    """
    if not context.outlasts:
        raise error
    with context.recovering:
        if context.epoch != epoch:
            return
        before, recorder = context.size, context.recorder
        with recorder.recovery(f"{type(error).__name__}: {error}") if recorder is not None else nullcontext():
            _go_on_among_those_left(context, error)
        context.fruitless = context.fruitless + 1 if context.size == before else 0
        if context.fruitless > _FRUITLESS:
            raise error


def _go_on_among_those_left(context: Context, failure: SordinoError) -> None:
    while True:
        try:
            _go_on(context, f"{type(failure).__name__}: {failure}")
            with context.plainly(), context.names_of_epoch():
                _meet_again(context)
                for one in list(context.on_resize):
                    if one.size != context.size:
                        one.callback(one.size, context.size)
                        one.size = context.size
            break
        except LOSSES as another:
            failure = another


def go_on_after(context: Context, error: SordinoError) -> None:
    """Go on after an error that an operation has raised.

    That is among those that are left, if it was a loss that ended the world, else as before. Collective over them.
    Raises `error` where this rank cannot go on.
    """
    if isinstance(error, (NoQuorum, Evicted)):
        raise error
    if context.world.failed:
        recover(context, error, context.epoch)


def _go_on(context: Context, why: str) -> None:
    """Adopt the next world, and tell the launcher who is not in it."""
    before = set(context.world.identities)
    context.adopt(context.world.successor(why))
    lost = sorted(before.difference(context.world.identities))
    if lost and context.rank == 0:
        ranks = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        text = f"{context.size} ranks go on without {ranks} (numbered as at the start): {why}"
        _log.warning("%s", text, extra={"rank": context.rank})
    tell_of_the_lost(lost, context.identity, context.started)


def _gather(context: Context, value: Any, name: str) -> list[Any]:
    """Return what all ranks say, as JSON, in their order. Collective.

    It stands on the core alone: what is above it is made anew only after this.
    """

    def gathered(what: str, tensor: torch.Tensor) -> torch.Tensor:
        handle = context.world.run(Request(opcode.ALLGATHER, f"{name}.{what}", [describe(tensor)], keep=tensor))
        handle.wait()
        return from_result(handle.results[0], tensor.dtype)

    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths: list[int] = gathered("lengths", torch.tensor([len(mine)], device=HOST)).tolist()
    return [json.loads(part.numpy().tobytes()) for part in gathered("words", mine).split(lengths)]


def _meet_again(context: Context) -> None:
    """Compare how far the ranks that are left have come, and make things again. Collective over them.

    They make again what was made for all and what all of them still have: some may have done with an optimizer that
    others are about to let go.
    """
    mine = {key: (one.arrived, one.committed) for key, one in context.locksteps.items()}
    recoverables = context.living_recoverables()
    made = [one.name for one in recoverables]
    gathered = _gather(context, (context.identity, mine, made), f"survivors {context.epoch}")
    told: dict[int, Any] = {identity: counts for identity, counts, _ in gathered}
    for key, lockstep in context.locksteps.items():
        counts = [told[one].get(key, (0, 0)) for one in lockstep.identities if one in told]
        lockstep.through = max(min(arrived for arrived, _ in counts), *(committed for _, committed in counts))
        if lockstep.begun > max(lockstep.committed, lockstep.through):
            lockstep.undo()
            lockstep.arrived = lockstep.begun - 1
    for process_set in context.process_sets:
        register_again(context, process_set)
    for one in recoverables:
        others = one.process_set.ranks if one.name else []
        method = one.renew() if all(one.name in gathered[rank][2] for rank in others) else one.give_up()
        if method is not None:
            method()
