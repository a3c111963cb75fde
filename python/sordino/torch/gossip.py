"""Gossip in an optimizer: step on one's own gradients, then mix the parameters with those of a few other workers.

What is mixed with whom is the algorithm's to say (`sordino.algorithms.gossip`), what that does to a rank's parameters
is `sordino.torch.mixing`'s; moving and averaging is the core's. The exchanges of a process set run on a set of their
own, in the order of the calls, with no rank that coordinates them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sordino import kinds
from sordino.algorithms import ElasticAveraging, GossipAlgorithm, PushSum
from sordino.context import Context
from sordino.errors import UsageError
from sordino.torch.autograd import allgather
from sordino.torch.gradients import GradientReducer
from sordino.torch.mixing import Meeting, Mixing, mixing_of
from sordino.torch.parameters import ParameterArena
from sordino.torch.process_sets import ProcessSet
from sordino.torch.segments import Settings, check_layout

Named = Sequence[tuple[str, torch.Tensor]]


def _new_set(context: Context, ranks: Sequence[int], parent: ProcessSet) -> int:
    """Makes a process set that only the core knows. Collective over `parent`."""
    identity = parent.process_set_id or 0
    name = context.plan_name("internal_process_set", identity)
    handle = context.world.run(kinds.ADD_SET, name, [], splits=list(ranks), process_set=identity)
    handle.wait()
    return int(handle.numbers[0])


def _channel(context: Context, process_set: ProcessSet) -> int:
    """The set that exchanges of a process set run on. Collective over it the first time."""
    identity = process_set.process_set_id or 0
    if identity not in context.channels:
        context.channels[identity] = _new_set(context, process_set.ranks or [], process_set)
    return context.channels[identity]


def _group(context: Context, process_set: ProcessSet, size: int) -> ProcessSet:
    """The group of `size` neighbouring ranks that this rank is in. Collective over `process_set` the first time."""
    ranks = process_set.ranks or []
    if size == len(ranks):
        return process_set
    key = (process_set.process_set_id or 0, size)
    for begin in range(0, len(ranks), size) if key not in context.groups else ():
        members = ranks[begin : begin + size]
        identity = _new_set(context, members, process_set)
        if context.rank in members:
            context.groups[key] = (identity, members)
    identity, members = context.groups[key]
    group = ProcessSet(members)
    group.process_set_id = identity
    return group


class GossipSteps:
    """What makes the steps of an optimizer those of a gossip algorithm.

    Args:
        names: of the parameters, the same on all ranks.
        parameters: that the optimizer steps. They move into shared memory.
        buffers: floating-point buffers that are averaged along with them.
        settings: how gradients are reduced within groups; its process set is that of all workers.
        compare: whether to meet the other ranks now (collective), or at the first step.
    """

    done = False
    supports_amp_scaling = True

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        buffers: Named,
        algorithm: GossipAlgorithm,
        settings: Settings,
        compare: bool,
    ) -> None:
        self.context = context
        self.algorithm = algorithm
        self.settings = settings
        self.active = context.size > 1 and bool(settings.process_set.included())
        self._names = list(names)
        self._parameters = list(parameters)
        self._buffers = list(buffers)
        self._steps = 0  # of the optimizer
        self._round = 0  # exchanges so far
        self._reducer: GradientReducer | None = None
        self._arena: ParameterArena | None = None
        self._mixing: Mixing | None = None
        self._loaded: dict[str, Any] = {}  # of the mixing, before there is one
        if compare and self.active:
            self._meet()

    def _meet(self) -> Mixing:
        context, algorithm, everybody = self.context, self.algorithm, self.settings.process_set
        ranks = everybody.ranks or []
        segments = "model" if isinstance(algorithm, ElasticAveraging) else algorithm.segments
        arena = ParameterArena(
            context,
            self._names + [f"buffer {name}" for name, _ in self._buffers],
            self._parameters + [buffer for _, buffer in self._buffers],
            segments if isinstance(segments, (str, int)) else tuple(segments),
            weighted=isinstance(algorithm, PushSum),
        )
        check_layout(context, arena.layout, everybody)
        name = context.plan_name(f"gossip.{arena.layout.hash:x}", everybody.process_set_id)
        told = allgather(torch.tensor([int(arena.shared)]), name=f"{name}.shared", process_set=everybody)
        place = ranks.index(context.rank)
        meeting = Meeting(context, everybody, _channel(context, everybody), name, place, bool(told.all()))
        mixing = mixing_of(meeting, arena, algorithm)
        mixing.load_state(self._loaded)
        if algorithm.workers_in_group > 1:
            group = _group(context, everybody, algorithm.workers_in_group)
            settings = Settings(**{**self.settings.__dict__, "process_set": group})
            self._reducer = GradientReducer(context, self._names, self._parameters, settings, compare=True)
        self._steps_here = not algorithm.leaders_only or place % algorithm.workers_in_group == 0
        context.on_join[id(self)] = weakref.WeakMethod(self._refuse_join)
        self._arena, self._mixing = arena, mixing
        return mixing

    def _refuse_join(self) -> None:
        raise UsageError(
            f"join() cannot stand in for a worker of {type(self.algorithm).__name__}: others will want its parameters. "
            "Give all ranks the same number of steps"
        )

    def release(self) -> None:
        """Lets go of the parameters: another object takes over. They stay where they are."""
        self.context.on_join.pop(id(self), None)
        if self._reducer is not None:
            self._reducer.release()

    @property
    def in_flight(self) -> bool:
        """Whether gradients are being reduced."""
        return self._reducer is not None and self._reducer.in_flight

    @property
    def ready(self) -> bool:
        """Whether gradients wait to be reduced."""
        return self._reducer is not None and self._reducer.ready

    def synchronize(self) -> None:
        """Waits until gradients are reduced within the group."""
        if self._reducer is not None:
            self._reducer.synchronize()

    def reset(self) -> None:
        """Begins a new cycle: this one's gradients have been used, or replaced."""
        if self._reducer is not None:
            self._reducer.reset()

    def flush(self) -> None:
        """Takes in what is still under way. Collective."""
        if self._mixing is not None and self._arena is not None:
            self._arena.adopt()
            self._mixing.flush()

    def state(self) -> dict[str, Any]:
        """What `state_dict()` keeps of the algorithm."""
        mixing = self._loaded if self._mixing is None else self._mixing.state()
        return {"steps": self._steps, "round": self._round, **mixing}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state()` was taken."""
        self._steps, self._round = state["steps"], state["round"]
        self._loaded = {key: value for key, value in state.items() if key not in ("steps", "round")}
        if self._mixing is not None:
            self._mixing.load_state(self._loaded)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, synchronize: bool) -> Any:
        """Steps the optimizer and, every `interval` steps, exchanges."""
        if not self.active:
            return optimizer.step(closure)  # type: ignore[arg-type]
        (self._mixing or self._meet()).begin()
        result: Any = None
        if self._reducer is not None:
            stepping = optimizer if self._steps_here else _Standing(optimizer)
            result = self._reducer.step(stepping, closure, synchronize)  # type: ignore[arg-type]
        else:
            result = optimizer.step(closure)  # type: ignore[arg-type]
        self.after_step()
        return result

    def after_step(self) -> None:
        """Counts a step, also one that was left out because gradients were infinite, and exchanges if it is time."""
        if not self.active:
            return
        mixing = self._mixing or self._meet()
        assert self._arena is not None
        self._steps += 1
        if self._steps % self.algorithm.interval == 0:
            self._arena.adopt()
            mixing.exchange(self._round)
            self._round += 1


class _Standing:
    """In place of the optimizer of a rank that leaves stepping to its leader: evaluates a closure, changes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()
