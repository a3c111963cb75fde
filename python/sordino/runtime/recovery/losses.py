"""Recovery from lost ranks: the remaining ranks all complete, or all repeat, the operation that a loss interrupted.

A `Lockstep` is a sequence of numbered parts that some ranks execute together, in one order. It has these counters:

| counter | set to the number of the part |
|---|---|
| begun_part | when the part begins (`Lockstep.next`) |
| received_part | when this rank has its results. Then it enters a barrier, and uses the results only after that |
| committed_part | after the barrier, or a recovery, has shown that all ranks have their results |
| completed_part | after a loss: max(least `received_part`, greatest `committed_part`) over the remaining ranks |

After a loss the remaining ranks compare their counters (`_meet_again`). A part up to `completed_part` is complete. No
rank has used results of a later part, so all ranks undo and repeat it.
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
from sordino.log import logger
from sordino.rendezvous.notices import tell_of_the_lost
from sordino.runtime import opcode
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST
from sordino.runtime.loss_state import Lockstep, nothing
from sordino.runtime.process_set import ProcessSet, register_again
from sordino.runtime.tensors import describe, from_result

_log = logger(__name__)
LOSSES = (PeerLost, Timeout, TransportError)
"""Errors that end a world but that its remaining ranks can survive."""
_OF_ALL = (OperationMismatch, ConfigurationMismatch, LayoutMismatch, NonFinite)  # errors that all ranks raise together
_EMPTY_RECOVERIES = 3  # maximum number of successive recoveries without a lost rank

Result = TypeVar("Result")


def together(
    context: Context,
    process_set: ProcessSet,
    work: Callable[[], Result],
    undo: Callable[[], None] = nothing,
    lockstep: Lockstep | None = None,
) -> Result:
    """Call `work()`, which communicates, so that all remaining ranks complete it or all repeat it. Collective.

    Args:
        context: the context of this rank.
        process_set: the ranks that call this.
        work: called again, in a smaller world, if a rank is lost before all have their results.
        undo: called before the repetition; restores what `work` has changed.
        lockstep: the sequence of which this is the next part; None: the sequence of all operations of these ranks.

    Returns:
        the result of `work`.

    Raises:
        SordinoError: as raised by `work`; NoQuorum or Evicted if this rank cannot continue.
        UsageError: another thread of this rank executes a part of the same sequence.
    """
    if context.losses.raises_on_loss:
        return work()
    if lockstep is None:
        lockstep = context.lockstep("operations", process_set)
    with lockstep.next(undo) as number:
        name_again = context.names.until_now()
        while True:
            epoch = context.epoch
            try:
                with context.losses.raising_on_loss():
                    outcome = _outcome_of(work)
                    lockstep.received_part = number
                    _say_arrived(context, lockstep, number, process_set)
                context.losses.empty_recoveries = 0
                break
            except LOSSES as error:
                recover(context, error, epoch)
                if lockstep.completed_part >= number:
                    break
                name_again()
        lockstep.committed_part = number
    return outcome()


def _outcome_of(work: Callable[[], Result]) -> Callable[[], Result]:
    """Call `work()`. Return a function that returns its result, or raises its error if all ranks raise that error."""
    try:
        result = work()
    except _OF_ALL as error:
        refusal = error  # a second name, because Python deletes `error` at the end of the block

        def refuse() -> Result:
            raise refusal

        return refuse
    return lambda: result


def _say_arrived(context: Context, lockstep: Lockstep, number: int, process_set: ProcessSet) -> None:
    identity = process_set.process_set_id or 0
    name = f"{lockstep.key}.{number}.arrived"
    context.world.run(Request(opcode.BARRIER, name, [], process_set=identity)).wait()


def again(context: Context, work: Callable[[], Result]) -> Result:
    """Call `work()`, and repeat it in a smaller world if a rank is lost meanwhile.

    No barrier follows, so after a loss some ranks may have completed `work` while others repeat it.
    """
    if context.losses.raises_on_loss:
        return work()
    name_again = context.names.until_now()
    while True:
        epoch = context.epoch
        try:
            with context.losses.raising_on_loss():
                result = work()
            context.losses.empty_recoveries = 0
            return result
        except LOSSES as error:
            recover(context, error, epoch)
            name_again()


def recover(context: Context, error: SordinoError, epoch: int) -> None:
    """Continue in the world of the remaining ranks.

    Collective over the remaining ranks: each calls this when one of its operations fails, at any place in its program.

    Args:
        context: the context of this rank, which adopts the next world.
        error: the error that has ended the world of `epoch`. It is raised again if ranks do not survive losses, or
            after more than 3 successive recoveries without a lost rank.
        epoch: epoch of the context when the failed operation began. If it has changed, this returns at once.

    Raises:
        NoQuorum, Evicted: this rank cannot continue.
    """
    if not context.survives_losses:
        raise error
    with context.losses.recovering:
        if context.epoch != epoch:
            return
        before, recorder = context.size, context.recorder
        with recorder.recovery(f"{type(error).__name__}: {error}") if recorder is not None else nullcontext():
            _go_on_among_those_left(context, error)
        context.losses.empty_recoveries = context.losses.empty_recoveries + 1 if context.size == before else 0
        if context.losses.empty_recoveries > _EMPTY_RECOVERIES:
            raise error


def _go_on_among_those_left(context: Context, failure: SordinoError) -> None:
    while True:
        try:
            _go_on(context, f"{type(failure).__name__}: {failure}")
            with context.losses.raising_on_loss(), context.names.of_epoch():
                if _meet_again(context):
                    _tell_size(context)
            break
        except LOSSES as another:
            failure = another


def _tell_size(context: Context) -> None:
    for one in list(context.losses.on_resize):
        if one.size != context.size:
            one.callback(one.size, context.size)
            one.size = context.size
    context.losses.told_size = context.size


def go_on_after(context: Context, error: SordinoError) -> None:
    """Continue after an error of an operation: with the remaining ranks if the world has failed, else unchanged.

    Collective over the remaining ranks. Raises `error` if this rank cannot continue.
    """
    if isinstance(error, (NoQuorum, Evicted)):
        raise error
    if context.world.failed:
        recover(context, error, context.epoch)


def _go_on(context: Context, why: str) -> None:
    """Adopt the next world, and tell the launcher which ranks are lost."""
    before = set(context.identities)
    context.adopt(context.world.successor(why))
    lost = sorted(before.difference(context.identities))
    if lost and context.rank == 0:
        ranks = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        text = f"{context.size} ranks continue without {ranks} (numbered as at the start): {why}"
        _log.warning("%s", text, extra={"rank": context.rank})
    tell_of_the_lost(lost, context.identity, context.started)


def gather_by_core(context: Context, value: Any, name: str) -> list[Any]:
    """Return the values of all ranks, sent as JSON, in rank order. Collective.

    It uses the core only, because higher layers are renewed after this.
    """

    def gathered(what: str, tensor: torch.Tensor) -> torch.Tensor:
        handle = context.world.run(Request(opcode.ALLGATHER, f"{name}.{what}", [describe(tensor)], keep=tensor))
        handle.wait()
        return from_result(handle.results[0], tensor.dtype)

    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths: list[int] = gathered("lengths", torch.tensor([len(mine)], device=HOST)).tolist()
    return [json.loads(part.numpy().tobytes()) for part in gathered("words", mine).split(lengths)]


def _meet_again(context: Context) -> bool:
    """Compare the counters of the remaining ranks, and renew objects. Collective over the remaining ranks.

    An object is renewed if all of its ranks still have it. If some ranks have already released an optimizer, the other
    ranks are about to release it: they only give up its interrupted work.

    Returns:
        whether recovery calls the callbacks for changes of size. If all ranks are in a growth, the growth calls them.
        If only some are, the callbacks of the growth have ended on all ranks, so recovery calls them.
    """
    mine = {key: (one.received_part, one.committed_part) for key, one in context.losses.locksteps.items()}
    recoverables = context.losses.living_recoverables()
    made = [one.name for one in recoverables]
    said = (context.identity, mine, made, context.losses.unsettled, context.losses.tells_in_growth)
    gathered = gather_by_core(context, said, f"survivors {context.epoch}")
    counts_of: dict[int, Any] = {identity: counts for identity, counts, *_ in gathered}
    context.losses.mean_after_loss = not any(unsettled for *_, unsettled, _ in gathered)
    for key, lockstep in context.losses.locksteps.items():
        counts = [counts_of[one].get(key, (0, 0)) for one in lockstep.identities if one in counts_of]
        lockstep.completed_part = max(min(received for received, _ in counts), *(committed for _, committed in counts))
        if lockstep.begun_part > max(lockstep.committed_part, lockstep.completed_part):
            lockstep.undo()
            lockstep.received_part = lockstep.begun_part - 1
    for process_set in context.process_sets:
        register_again(context, process_set)
    for one in recoverables:
        others = one.process_set.ranks if one.name else []
        on_all = all(one.name in gathered[rank][2] for rank in others)
        method = one.weak_renew() if on_all else one.weak_give_up()
        if method is not None:
            method()
    return not all(tells for *_, tells in gathered)
