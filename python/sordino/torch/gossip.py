"""Gossip in an optimizer: step on one's own gradients, then mix the parameters with those of a few other workers.

What is mixed with whom is the algorithm's to say (`sordino.algorithms.gossip`); moving and averaging is the core's. The
exchanges of a process set run on a set of their own, in the order of the calls, with no rank that coordinates them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sordino import kinds
from sordino._core import Inbox, Topology
from sordino.algorithms import GossipAlgorithm
from sordino.context import Context
from sordino.errors import UsageError
from sordino.torch.autograd import allgather
from sordino.torch.gradients import GradientReducer
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
        if compare and self.active:
            self._meet()

    def _meet(self) -> None:
        context, algorithm, everybody = self.context, self.algorithm, self.settings.process_set
        ranks = everybody.ranks or []
        arena = ParameterArena(
            context,
            self._names + [f"buffer {name}" for name, _ in self._buffers],
            self._parameters + [buffer for _, buffer in self._buffers],
            algorithm.segments if isinstance(algorithm.segments, (str, int)) else tuple(algorithm.segments),
        )
        check_layout(context, arena.layout, everybody)
        self._topologies: list[Topology] = algorithm.rounds_of(len(ranks), arena.segment_count)
        name = context.plan_name(f"gossip.{arena.layout.hash:x}", everybody.process_set_id)
        told = allgather(torch.tensor([int(arena.shared)]), name=f"{name}.shared", process_set=everybody)
        self._shared = bool(told.all())
        self._channel = _channel(context, everybody)
        self._name = name
        self._inbox = Inbox(context.world)
        if algorithm.workers_in_group > 1:
            group = _group(context, everybody, algorithm.workers_in_group)
            settings = Settings(**{**self.settings.__dict__, "process_set": group})
            self._reducer = GradientReducer(context, self._names, self._parameters, settings, compare=True)
        self._steps_here = not algorithm.leaders_only or ranks.index(context.rank) % algorithm.workers_in_group == 0
        context.on_join[id(self)] = weakref.WeakMethod(self._refuse_join)
        self._arena = arena

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

    def state(self) -> dict[str, int]:
        """What `state_dict()` keeps of the algorithm."""
        return {"steps": self._steps, "round": self._round}

    def load_state(self, state: dict[str, int]) -> None:
        """Goes on where `state()` was taken."""
        self._steps, self._round = state["steps"], state["round"]

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, synchronize: bool) -> Any:
        """Steps the optimizer and, every `interval` steps, exchanges."""
        if not self.active:
            return optimizer.step(closure)  # type: ignore[arg-type]
        if self._arena is None:
            self._meet()
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
        if self._arena is None:
            self._meet()
        self._steps += 1
        if self._steps % self.algorithm.interval == 0:
            self._exchange()

    def _exchange(self) -> None:
        arena = self._arena
        assert arena is not None
        arena.adopt()
        for k, topology in enumerate(self._topologies):
            handle = self.context.world.exchange(
                name=f"{self._name}.{self._round}.{k}",
                process_set=self._channel,
                layout=arena.layout,
                topology=topology,
                round=self._round,
                source=arena.address,
                result=arena.address,
                shared=self._shared,
                without_own=False,
                inbox=self._inbox,
                wait=True,
                keep=arena.arena,
            )
            handle.wait()
        self._round += 1


class _Standing:
    """In place of the optimizer of a rank that leaves stepping to its leader: evaluates a closure, changes nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()
