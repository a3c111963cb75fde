"""Growth: processes join a running job between two steps, and ranks leave it in good order.

The ranks form the next world while they keep the old one.

| step | ranks | newcomer |
|---|---|---|
| 1 | | knocks at the launcher's door, with its settings and the layout of its model (`join`) |
| 2 | all leave their optimizers in a state from which a newcomer can start (`admit`) | waits |
| 3 | the first rank refuses newcomers that do not fit, invites the others, and tells all ranks the plan | is invited |
| 4 | all meet at the launcher, and form the next world | meets them |
| 5 | they compare, in the old world, whether all have formed it. If not, they drop it and keep the old one | |
| 6 | they adopt it, and meet newcomers in a barrier there | adopts it after the barrier, else knocks again |
| 7 | all make their optimizers again, and leave the old world | makes its optimizers again |

A rank that wants to leave takes part until step 5, and is not in the plan. Its model is in the mean of all models then.
The last rank cannot leave, as nothing of the job would remain: it stays until others have joined.

A rank that is lost before step 6 is lost in the old world, whose ranks recover and repeat the steps from 3 on. After
that it is lost in the new one, like a newcomer that is lost after its barrier.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from sordino._core import Request, World, deadlines
from sordino.errors import ConfigurationMismatch, SordinoError, TransportError, UsageError
from sordino.log import logger
from sordino.rendezvous.door import Verdict
from sordino.rendezvous.fingerprints import comparing
from sordino.rendezvous.notices import tell_of_the_departure, tell_of_the_joining
from sordino.rendezvous.sockets import SocketRendezvous
from sordino.rendezvous.starts import ProcessStart
from sordino.runtime import opcode
from sordino.runtime.context import Context
from sordino.runtime.process_set import global_process_set
from sordino.runtime.recovery.losses import LOSSES, again, gather_by_core, together

_log = logger(__name__)
_MEETING_S = 10.0  # for newcomers that were invited to come; ranks wait meanwhile
_BARRIER = "grown"


@dataclass(frozen=True)
class Plan:
    """The next world, as the first rank plans it.

    Attributes:
        key: name of the meeting.
        members: identities of its ranks, with those of the newcomers at the end.
        newcomers: number of newcomers.
        leavers: identities of the ranks that leave.
        epoch: its epoch.
        started: number of ranks with which the job began.
        job_id: `Context.job_id`.
    """

    key: str
    members: list[int]
    newcomers: int
    leavers: list[int]
    epoch: int
    started: int
    job_id: str

    def encoded(self) -> bytes:
        """Return the plan as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, text: bytes) -> Plan:
        """Return the plan from JSON."""
        return cls(**json.loads(text))


def wait_outside(context: Context) -> bool:
    """Return whether processes wait to join, as far as this rank can know: only the first rank asks the launcher."""
    door = _door(context)
    if context.rank != 0 or door is None:
        return False
    try:
        return bool(door.newcomers())
    except TransportError:  # the launcher has gone, and ends the ranks
        return False


def admit(context: Context, layout: Sequence[str], leaves: bool = False) -> None:
    """Let processes join that wait for it, and ranks leave that want to. Collective over the ranks, between steps.

    On a rank that leaves, this ends the process with status 0.

    Args:
        context: the context of this rank, which adopts the next world.
        layout: lines that must be the same on a newcomer, besides those of the optimizers.
        leaves: whether this rank wants to leave.

    Raises:
        SordinoError: this rank cannot go on without lost ranks.
    """
    said = together(
        context, global_process_set, lambda: gather_by_core(context, (wait_outside(context), leaves), "changes")
    )
    if not any(waits or goes for waits, goes in said):
        return
    lines = _layout(context, layout)
    for one in context.losses.living_growing():
        one.before_growth()
    if _door(context) is None:  # the others notice the departure in their next operation
        return _leave(context) if leaves and not all(goes for _, goes in said) else None
    formed: list[World] = []
    plan = together(context, global_process_set, lambda: _formed(context, lines, leaves, formed))
    if plan is None:
        return None
    if context.identity in plan.leavers:
        _leave(context)
    old, recorder = context.world, context.recorder
    with recorder.growth() if recorder is not None else nullcontext():
        _adopt(context, formed.pop(), plan)
        again(context, lambda: _meet_newcomers(context))
        old.shutdown("")
        _make_again(context)
    if context.rank == 0:
        changes = [f"with {_named(plan.members[-plan.newcomers :])}"] if plan.newcomers else []
        changes += [f"without {_named(plan.leavers)}, which left"] if plan.leavers else []
        _log.warning("%d ranks continue %s", context.size, " and ".join(changes))
    return None


def _leave(context: Context) -> NoReturn:
    tell_of_the_departure()
    _log.info("rank %d leaves the job", context.rank)
    context.shutdown("it has left the job")
    sys.exit(0)


def join(context: Context, layout: Sequence[str]) -> None:
    """Join the running job. The ranks let this process in between two of their steps.

    If the job ends meanwhile, this process ends with status 0.

    Args:
        context: the context of this process, alone so far.
        layout: as in `admit`.

    Raises:
        ConfigurationMismatch: the job has other settings or another model.
        TransportError: the launcher is gone.
    """
    door, start = _door(context), context.start
    if door is None:
        raise UsageError("this process cannot join the job: its launcher has no door for newcomers")
    settings, _ = comparing(None, True)
    introduction = json.dumps({"settings": settings, "layout": _layout(context, layout)}).encode()
    _log.info("process %d waits to join the running job", context.identity)
    while True:
        verdict, text = door.knock(introduction, deadlines()[1])
        if verdict is Verdict.OVER:
            tell_of_the_departure()
            _log.warning("the job has ended before process %d could join it", context.identity)
            sys.exit(0)
        if verdict is Verdict.REFUSED:
            raise ConfigurationMismatch(f"this process cannot join the running job: {text.decode()}")
        plan, world = Plan.decoded(text), None
        try:
            world = start.grown_world(plan.members, plan.key, _MEETING_S)
            world.run(Request(opcode.BARRIER, _BARRIER, [])).wait()
        except LOSSES as error:
            _log.info("the ranks did not let process %d in: %s", context.identity, error)
            if world is not None:
                world.shutdown("")
            continue
        break
    tell_of_the_joining()
    alone, recorder = context.world, context.recorder
    with recorder.growth() if recorder is not None else nullcontext():
        _adopt(context, world, plan)
        alone.shutdown("")
        _make_again(context)


def _door(context: Context) -> SocketRendezvous | None:
    """Return the rendezvous at which processes can join; None without one, or if a loss ends the job."""
    start = context.start
    return start.door() if isinstance(start, ProcessStart) and context.survives_losses else None


def _layout(context: Context, more: Sequence[str]) -> list[str]:
    return [*more, *(line for one in context.losses.living_growing() for line in one.layout())]


def _formed(context: Context, layout: Sequence[str], leaves: bool, formed: list[World]) -> Plan | None:
    """Form the next world, and put it into `formed`, unless this rank leaves.

    Return its plan; None if not all ranks have formed it, or it would have the same ranks.
    """
    _drop(formed)
    leavers = [
        identity for identity, goes in zip(context.identities, gather_by_core(context, leaves, "leavers")) if goes
    ]
    if len(leavers) == context.size:
        leavers = []
    said = _planned(context, layout, leavers).encoded().decode() if context.rank == 0 else ""
    plan = Plan.decoded(gather_by_core(context, said, "plan")[0].encode())
    if plan.newcomers == 0 and not leavers:
        return None
    failure = ""
    try:
        if context.identity not in leavers:
            formed.append(context.start.grown_world(plan.members, plan.key, _MEETING_S))
    except SordinoError as error:
        failure = f"{type(error).__name__}: {error}"
    failures = [one for one in gather_by_core(context, failure, "formed") if one]
    if not failures:
        return plan
    _drop(formed)
    if context.rank == 0:
        _log.warning("the ranks could not form a world with other ranks: %s", failures[0])
    return None


def _drop(formed: list[World]) -> None:
    while formed:
        formed.pop().shutdown("the ranks keep their old world")


def _planned(context: Context, layout: Sequence[str], leavers: Sequence[int]) -> Plan:
    """Answer the newcomers, and return the plan."""
    door = _door(context)
    assert door is not None
    mine, _ = comparing(None, True)
    fit = []
    for number, introduction in door.newcomers():
        problem = _problem(context, introduction, mine, layout)
        if problem:
            _log.warning("process %d was refused: %s", number, problem)
            door.answer(number, Verdict.REFUSED, problem.encode())
        else:
            fit.append(number)
    stay = [identity for identity in context.identities if identity not in leavers]
    plan = Plan(
        secrets.token_hex(8), [*stay, *fit], len(fit), list(leavers), context.epoch + 1, context.started, context.job_id
    )
    for number in fit:
        door.answer(number, Verdict.INVITED, plan.encoded())
    return plan


def _problem(context: Context, introduction: bytes, settings: str, layout: Sequence[str]) -> str:
    """Return why a newcomer does not fit; "" if it does."""
    if context.process_sets:
        return "the job has process sets of its own, which a newcomer does not know; remove them first"
    try:
        theirs: dict[str, Any] = json.loads(introduction)
        its_settings, its_layout = str(theirs["settings"]), [str(line) for line in theirs["layout"]]
        _, compare = comparing(None, True)
        compare([settings, its_settings])
    except ConfigurationMismatch as error:
        return f"settings differ between the job (rank 0) and the newcomer (rank 1): {error}"
    except (ValueError, KeyError, TypeError, TransportError):
        return "its introduction cannot be read"
    pairs = zip([*layout, "nothing"], [*its_layout, "nothing"])
    ours, its = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    return f"the job has {ours}, and the newcomer {its}" if ours != its else ""


def _adopt(context: Context, world: World, plan: Plan) -> None:
    context.adopt_grown(world, plan.members, plan.epoch, plan.started, plan.job_id)


def _meet_newcomers(context: Context) -> None:
    context.world.run(Request(opcode.BARRIER, _BARRIER, [])).wait()


def _make_again(context: Context) -> None:
    """Make the objects of all ranks again, and report the change of size. Collective over the grown world."""

    def make() -> None:
        for one in context.losses.living_growing():
            one.after_growth()

    together(context, global_process_set, make)
    for one in list(context.losses.on_resize):
        one.callback(one.size, context.size)
        one.size = context.size


def _named(numbers: Sequence[int]) -> str:
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
