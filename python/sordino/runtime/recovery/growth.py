"""Growth: processes join a running job between two steps, and ranks leave it in good order.

The ranks form the next world while they keep the old one. A vote at the launcher (rendezvous/votes.py) or at the store
where the ranks meet (rendezvous/store_admission.py) decides which of the two they use. Its outcome is the same on all
ranks, even if a rank is lost meanwhile.

| step | ranks | newcomer |
|---|---|---|
| 1 | | asks to join, with its settings and the layout of its model (`join`) |
| 2 | the first rank refuses newcomers that do not fit; all agree on the plan of the next world (`admit`) | waits |
| 3 | they bring their optimizers into a state from which a newcomer can start | |
| 4 | the first rank invites the newcomers; all meet at the launcher or store, and form the next world | meets them |
| 5 | they vote whether they have formed it | votes, too |
| 6 | if not: they drop it, and continue in the old world | if not: drops it, and asks again |
| 7 | if so: they adopt it, leave the old world, and renew their optimizers | if so: the same |

A rank that wants to leave takes part until the vote, and is not in the next world. In step 3 its model has become part
of the mean of all models. If all ranks want to leave, none does, because nothing of the job would remain: they stay
until others have joined.

Until a newcomer has synchronized its state, no recovery may take the mean of all models (`LossState.unsettled`).
"""

from __future__ import annotations

import gc
import hashlib
import json
import secrets
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from sordino._core import World, deadlines, end_alone
from sordino.errors import ConfigurationMismatch, SordinoError, TransportError, UsageError
from sordino.log import logger
from sordino.rendezvous.fingerprints import comparing
from sordino.rendezvous.join_requests import Admission, Verdict
from sordino.rendezvous.notices import tell_of_the_departure, tell_of_the_joining
from sordino.rendezvous.starts import ProcessStart
from sordino.runtime.context import Context, replace_current
from sordino.runtime.loss_state import nothing
from sordino.runtime.process_set import global_process_set
from sordino.runtime.recovery.losses import gather_by_core, together

_log = logger(__name__)
_MEETING_S = 10.0  # time limit of invited newcomers; ranks wait meanwhile
_LONGEST_LAYOUT = 1 << 18  # characters; of a longer one only the hash is sent


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
        steps: number of steps in the first rank's record; 0 without one.
    """

    key: str
    members: list[int]
    newcomers: int
    leavers: list[int]
    epoch: int
    started: int
    job_id: str
    steps: int

    def encoded(self) -> bytes:
        """Return the plan as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, text: bytes) -> Plan:
        """Return the plan from JSON."""
        return cls(**json.loads(text))

    @property
    def voters(self) -> list[int]:
        """Identities of the ranks that must form the world or agree to leave."""
        return [*self.members, *self.leavers]


def wait_outside(context: Context) -> bool:
    """Return whether processes wait to join. False on all ranks but the first, which alone reads the requests."""
    admission = _admission(context)
    if context.rank != 0 or admission is None:
        return False
    try:
        return admission.waits()
    except TransportError:  # the launcher is busy, or the launcher or the store is gone
        return False


def admit(context: Context, layout: Sequence[str], leaves: bool = False) -> bool:
    """Let waiting processes join, and let ranks leave that want to. Collective over the ranks, between steps.

    On a rank that leaves, this raises SystemExit with status 0. If all ranks want to leave, none does.

    Args:
        context: the context of this rank, which adopts the next world.
        layout: lines that must be the same on a newcomer, besides the lines of the optimizers.
        leaves: whether this rank wants to leave.

    Returns:
        whether all ranks wanted to leave, and none has joined.

    Raises:
        SordinoError: this rank cannot continue after a loss.
    """
    gc.collect()  # an optimizer that only a reference cycle keeps alive would be renewed on some ranks only
    lines = _layout(context, layout)
    plan, all_want_to_leave = together(context, global_process_set, lambda: _agreed_plan(context, lines, leaves))
    if plan is None:
        return all_want_to_leave
    for one in context.losses.living_growing():
        one.before_growth()
    admission = _admission(context)
    if admission is None or context.has_process_sets():  # the others recover without the ranks that leave
        if context.identity in plan.leavers:
            _leave(context)
        return all_want_to_leave
    world, problem = _elected(context, admission, plan)
    if problem:
        if context.rank == 0:
            _log.warning("the ranks go on as before, without other ranks: %s", problem)
        return all_want_to_leave
    if world is None:
        _leave(context)
    _move(context, world, plan)
    if context.rank == 0:
        joined = [identity for identity in plan.members[-plan.newcomers :] if identity in context.identities]
        changes = [f"with {_named(joined)}"] if plan.newcomers and joined else []
        changes += [f"without {_named(plan.leavers)}, which left"] if plan.leavers else []
        _log.warning("%d ranks continue %s", context.size, " and ".join(changes))
    return False


def _leave(context: Context) -> NoReturn:
    tell_of_the_departure()
    _log.info("rank %d leaves the job", context.rank)
    if isinstance(context.start, ProcessStart):
        context.start.end(over=False)
    context.shutdown("it has left the job")
    end_alone()  # the others use another world
    replace_current(None)  # so that the end of this process does not end the job
    sys.exit(0)


def join(context: Context, layout: Sequence[str]) -> None:
    """Join the running job. The ranks let this process in between two of their steps.

    If the job ends meanwhile, this raises SystemExit with status 0.

    Args:
        context: the context of this process, alone so far.
        layout: as in `admit`.

    Raises:
        ConfigurationMismatch: the job has other settings or another model.
        TransportError: the launcher or the store is gone, or a job at a store is over.
    """
    admission = _admission(context)
    if admission is None:
        raise UsageError("this process cannot join the job: its ranks meet in a way that does not admit new processes")
    settings, _ = comparing(None, True)
    introduction = json.dumps({"settings": settings, "layout": _layout(context, layout)}).encode()
    _log.info("process %d waits to join the running job", context.identity)
    while True:
        verdict, text = admission.ask_to_join(introduction, deadlines()[1])
        if verdict is Verdict.OVER:
            tell_of_the_departure()
            _log.warning("the job has ended before process %d could join it", context.identity)
            sys.exit(0)
        if verdict is Verdict.REFUSED:
            raise ConfigurationMismatch(f"this process cannot join the running job: {text.decode()}")
        plan = Plan.decoded(text)
        world, problem = _elected(context, admission, plan)
        if world is not None:
            break
        _log.info("the ranks did not let process %d in: %s", context.identity, problem)
    tell_of_the_joining()
    _move(context, world, plan)


def _admission(context: Context) -> Admission | None:
    """Return the rendezvous at which processes can join; None without one, or if a loss ends the job.

    Also None if only some of the job's ranks form the world, because the rendezvous has other numbers for them then.
    """
    start = context.start
    if not isinstance(start, ProcessStart) or not context.survives_losses:
        return None
    return start.admission() if context.newcomer is not None or context.started == start.size else None


def _layout(context: Context, more: Sequence[str]) -> list[str]:
    lines = [*more, *(line for one in context.losses.living_growing() for line in one.layout())]
    text = "\n".join(lines)
    if len(text) < _LONGEST_LAYOUT:
        return lines
    return [f"{len(lines)} values with the hash {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"]


def _agreed_plan(context: Context, layout: Sequence[str], leaves: bool) -> tuple[Plan | None, bool]:
    """Return the plan that the first rank makes, and whether all ranks want to leave. Collective.

    The plan is None if no rank joins or leaves.
    """
    leavers = [
        identity for identity, goes in zip(context.identities, gather_by_core(context, leaves, "leavers")) if goes
    ]
    all_want_to_leave = len(leavers) == context.size
    if all_want_to_leave:
        leavers = []
    said = _planned(context, layout, leavers).encoded().decode() if context.rank == 0 else ""
    plan = Plan.decoded(gather_by_core(context, said, "plan")[0].encode())
    return plan if plan.newcomers or plan.leavers else None, all_want_to_leave


def _planned(context: Context, layout: Sequence[str], leavers: Sequence[int]) -> Plan:
    """Refuse newcomers that do not fit, and return the plan with the others."""
    admission = _admission(context)
    fit = [] if admission is None else _fitting(context, admission, layout)
    stay = [identity for identity in context.identities if identity not in leavers]
    steps = 0 if context.recorder is None else context.recorder.steps
    return Plan(
        secrets.token_hex(8), [*stay, *fit], len(fit), list(leavers), context.epoch + 1, context.started,
        context.job_id, steps,
    )  # fmt: skip


def _fitting(context: Context, admission: Admission, layout: Sequence[str]) -> list[int]:
    """Refuse newcomers that do not fit, and return the numbers of the others."""
    try:
        newcomers = admission.newcomers()
    except TransportError:  # the launcher is busy now
        return []
    fit: list[int] = []
    for number, introduction in newcomers:
        problem = _problem(context, introduction, layout)
        if number in [*context.identities, *fit] or number < context.started:
            problem = f"{number} is the number of another process"
        if problem:
            _log.warning("process %d was refused: %s", number, problem)
            with suppress(TransportError):  # the newcomer notices, too, that the rendezvous is gone
                admission.answer(number, Verdict.REFUSED, problem.encode())
        else:
            fit.append(number)
    return fit


def _problem(context: Context, introduction: bytes, layout: Sequence[str]) -> str:
    """Return why a newcomer does not fit; "" if it does."""
    if context.has_process_sets():
        return "the job has process sets of its own, which a newcomer does not know; remove them first"
    try:
        theirs: dict[str, Any] = json.loads(introduction)
        its_settings, its_layout = str(theirs["settings"]), [str(line) for line in theirs["layout"]]
        settings, compare = comparing(None, True)
        compare([settings, its_settings])
    except ConfigurationMismatch as error:
        return f"settings differ between the job (rank 0) and the newcomer (rank 1): {error}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, TransportError):
        return "its introduction cannot be read"
    pairs = zip([*layout, "nothing"], [*its_layout, "nothing"])
    ours, its = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    return f"the job has {ours}, and the newcomer {its}" if ours != its else ""


def _elected(context: Context, admission: Admission, plan: Plan) -> tuple[World | None, str]:
    """Form the next world, and vote for it. Return the same as `_formed`; the problem may be that of another rank.

    Collective over the plan's voters. If this rank cannot learn the decision, it must not continue in either world: it
    tells the other ranks that it ends, and raises TransportError.
    """
    world, problem = _formed(context, admission, plan)
    try:
        agreed = admission.vote(plan.key, plan.voters, not problem, _MEETING_S)
    except TransportError as error:
        if problem:
            return None, problem  # all use the old world, because this rank has not agreed
        for one in (context.world, world):
            if one is not None:
                one.abort(f"it does not know which world the others use: {error}")
        raise
    if agreed:
        return world, ""
    if world is not None:
        world.shutdown("the ranks keep their old world")
    return None, problem or "another process has not formed the next world"


def _formed(context: Context, admission: Admission, plan: Plan) -> tuple[World | None, str]:
    """Return the next world (None on a rank that leaves or has a problem), and the problem ("" without one).

    Collective over the plan's members.
    """
    if context.newcomer is None and context.epoch + 1 != plan.epoch:
        return None, "a rank was lost meanwhile"
    try:
        if context.newcomer is None and context.rank == 0:
            for number in plan.members[len(plan.members) - plan.newcomers :]:
                admission.answer(number, Verdict.INVITED, plan.encoded())
        if context.identity in plan.leavers:
            return None, ""
        return context.start.grown_world(plan.members, plan.key, _MEETING_S), ""
    except SordinoError as error:
        return None, f"{type(error).__name__}: {error}"


def _move(context: Context, world: World, plan: Plan) -> None:
    """Adopt the next world, and leave the old one. Collective over the next world."""
    old, recorder = context.world, context.recorder
    recording: AbstractContextManager[None] = nullcontext()
    if recorder is not None:
        recording = recorder.growth() if context.newcomer is None else recorder.joining(plan.steps)
    with recording:
        context.adopt_grown(world, plan.members, plan.epoch, plan.started, plan.job_id)
        old.shutdown("")
        _make_again(context)


def _make_again(context: Context) -> None:
    """Renew the objects of all ranks, and report the change of size. Collective over the grown world.

    If a rank is lost meanwhile, some ranks may have completed a callback that others are still in. All ranks complete
    it before they report the loss. So callbacks get the same sizes in the same order on all ranks, and can be
    collective.
    """
    losses = context.losses

    def make() -> int:
        for one in losses.living_growing():
            one.after_growth()
        return context.size

    losses.tells_in_growth = True
    try:
        size = together(context, global_process_set, make)
        while True:
            for one in list(losses.on_resize):
                one.callback(one.size, size)
                one.size = size
            losses.told_size = size
            together(context, global_process_set, nothing)  # no rank continues before all have called the callbacks
            if losses.told_size == context.size:
                break
            size = together(context, global_process_set, lambda: context.size)
    finally:
        losses.tells_in_growth = False


def _named(numbers: Sequence[int]) -> str:
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
