"""What algorithms have in common that change parameters beside the optimizer: they count its steps and add to them."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sordino.algorithms import Algorithm
from sordino.context import Context, Survivor
from sordino.errors import UsageError
from sordino.torch.autograd import allreduce
from sordino.torch.gradients import GradientReducer
from sordino.torch.lasting import fitted
from sordino.torch.operation import Max
from sordino.torch.process_sets import ProcessSet
from sordino.torch.segments import Settings
from sordino.torch.surviving import LOSSES, again, recover, together
from sordino.torch.undo import Undo, take_mean

Named = Sequence[tuple[str, torch.Tensor]]


class ParameterSteps(ABC):
    """What makes the steps of an optimizer those of an algorithm.

    Where ranks go on without those that are lost, an exchange in which one is lost does not take place: parameters are
    as before it, and all that are left take the mean of theirs. Exchanges are counted, so that all go on with the same.

    Attributes:
        round: exchanges so far.

    Args:
        names: of the parameters, the same on all ranks.
        parameters: that the optimizer steps. They may move into shared memory.
        buffers: floating-point buffers that are averaged along with them.
        algorithm: whose steps they are.
        settings: how gradients are reduced within groups; its process set is that of all workers.
        compare: whether to meet the other ranks now (collective), or at the first step.
    """

    @property
    def levels(self) -> bool:
        """Whether those that are left take the mean of their parameters."""
        return True

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        buffers: Named,
        algorithm: Algorithm,
        settings: Settings,
        compare: bool,
    ) -> None:
        self.context = context
        self._asked = algorithm
        self.algorithm = fitted(context, algorithm, settings.members, settings.process_set)
        self.settings = settings
        self.active = context.size > 1 and bool(settings.process_set.included())
        self.names = list(names)
        self.parameters = list(parameters)
        self.buffers = list(buffers)
        self.steps = self.round = 0
        self.reducer: GradientReducer | None = None
        self._met = False
        self._floor = 0  # exchanges before this one are over
        self._furthest = 0  # steps that one of the ranks had taken when they met last
        self._undo = Undo(context)
        self._exchanging = False
        self._set_up()
        if compare and self.active:
            self.meet()

    @abstractmethod
    def _set_up(self) -> None:
        """Makes what the algorithm keeps, before the ranks meet."""

    def meet(self) -> None:
        """Finds the other ranks, the first time it is called. Collective."""
        if not self._met:
            together(self.context, self.settings.process_set, self._meet_all, self._part)

    def _meet_all(self) -> None:
        self.algorithm = fitted(self.context, self._asked, self.settings.members, self.settings.process_set)
        if self.active:
            self.settings.agreement.meet(self.context)
            self._meet()
        elif self.reducer is not None:  # this rank is alone
            self.reducer.release()
            self.reducer = None
        self._met = True
        self.context.on_join[id(self)] = weakref.WeakMethod(self._before_join)
        if self.context.outlasts:
            self.context.survivors[id(self)] = Survivor(
                weakref.WeakMethod(self.renew),
                weakref.WeakMethod(self.give_up),
                self.context.lasting_name(self.settings.agreement.name, self.settings.process_set),
                self.settings.process_set,
            )

    def _carried(self) -> dict[str, Any]:
        """What of the state is as good in another world."""
        return self.state()

    def _part(self, keeps_place: bool = False) -> None:
        """Undoes a meeting; with `keeps_place` for another one, after which this is among the survivors as before."""
        state = self._carried()
        survivor = self.context.survivors.get(id(self))
        reducer, self.reducer = self.reducer, None  # which may be at work
        self.release()
        if keeps_place and survivor is not None:
            self.context.survivors[id(self)] = survivor
        self.settings.agreement.part()
        self._set_up()
        self._met = False
        self.load_state(state)
        self.reducer = reducer
        self.active = self.context.size > 1 and bool(self.settings.process_set.included())

    @torch.no_grad()
    def renew(self) -> None:
        """Goes on among those that are left. Collective."""
        round = self.round + int(self._exchanging)
        self.give_up()
        self._part(keeps_place=True)
        self._meet_all()
        self.round = round
        if not self.active:
            return
        if self.levels:
            self._level([tensor.detach() for tensor in self._tensors])
        mine = torch.tensor([self.round, self.steps])
        furthest = allreduce(mine, op=Max, name=f"{self.label}.furthest", process_set=self.settings.process_set)
        self._floor, self._furthest = furthest.tolist()

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [*self.parameters, *(buffer for _, buffer in self.buffers)]

    @torch.no_grad()
    def give_up(self) -> None:
        """Undoes an exchange that the loss of a rank has interrupted."""
        self._undo.go_back(self._tensors)
        self._exchanging = False

    def _level(self, tensors: list[torch.Tensor]) -> None:
        """Gives all ranks the mean of theirs. Collective."""
        with self._undo.around(tensors):
            take_mean(tensors, f"{self.label}.level", self.settings.process_set)

    def exchange(self, tensors: Sequence[torch.Tensor], work: Callable[[], None]) -> None:
        """Counts an exchange, and does it: `work()`, which changes `tensors`. All that ranks say to each other for
        it is part of `work()`, so that those left after a loss do all of it or nothing."""
        if self.round >= self._floor:
            self._exchanging = True
            try:
                with self._undo.around(tensors):
                    self._level_group(tensors)
                    work()
            except LOSSES:
                raise  # it counts as one that all have behind them
            except BaseException:
                self._exchanging = False
                raise
            self._exchanging = False
        self.round += 1

    def _level_group(self, tensors: Sequence[torch.Tensor]) -> None:
        """Makes the models of a group one again where it is not the first: the ranks have come to it with the momenta
        of others, and some with a step that others had taken before."""
        group = self._replicas
        if self.context.epoch > 0 and group is not None and len(group.ranks or []) > 1:
            take_mean(tensors, f"{self.label}.group", group)

    @property
    def _replicas(self) -> ProcessSet | None:
        """The ranks that have one model together."""
        return None if self.reducer is None else self.reducer.settings.process_set

    @abstractmethod
    def _meet(self) -> None:
        """Makes what exchanges need. Collective."""

    def _reduce_within(self, process_set: ProcessSet) -> None:
        """Has gradients averaged over these ranks from now on."""
        if self.reducer is not None:
            self.reducer.regroup(process_set)
            return
        everybody = self.settings.process_set
        within = replace(self.settings, process_set=process_set)
        self.reducer = GradientReducer(self.context, self.names, self.parameters, within, True, everybody)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """To be called before every step, also one that is going to be left out. Collective."""
        if self.active:
            self.meet()
            again(self.context, lambda: self._begin_if_active(optimizer))

    def _begin_if_active(self, optimizer: torch.optim.Optimizer) -> None:
        if self.active:
            self._begin(optimizer)

    @abstractmethod
    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """What precedes a step."""

    @abstractmethod
    def after_step(self) -> None:
        """Counts a step, also one that was left out because gradients were infinite, and does what is to follow it."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What `state_dict()` keeps of the algorithm."""

    def check_state(self, state: dict[str, Any]) -> None:
        """UsageError for a state of another algorithm."""
        missing = self.state().keys() - state.keys() - {"centre"}
        if missing:
            raise UsageError(f"this is not a state of {self.label}: it lacks {', '.join(sorted(missing))}")

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state()` was taken."""

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Goes on where a checkpoint was taken, by all ranks alike."""
        self._floor = self._furthest = 0
        self.load_state(state)

    def take_over(self, old: ParameterSteps) -> None:
        """Goes on where an object that has settled stands, which may have had other parameters."""
        self.load_state(old.state())

    def _before_join(self) -> None:
        raise UsageError(
            f"join() cannot stand in for a worker of {self.label}: give all ranks the same number of steps"
        )

    @property
    def label(self) -> str:
        """The algorithm's name, for messages."""
        return type(self.algorithm).__name__

    def do_together(self, work: Callable[[], None]) -> None:
        """Does `work()`, which is collective, so that it is completed or repeated by all that are left."""
        if self.active:
            together(self.context, self.settings.process_set, work)
        else:
            work()

    @abstractmethod
    def flush(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes in what is still under way. Collective."""

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Leaves parameters and the optimizer so that another object can go on with them. Collective."""
        self.flush(optimizer)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state as that of whole parameters."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads a state of whole parameters."""
        optimizer.load_state_dict(state)

    def scaler_problem(self) -> str | None:
        """Why GradScaler cannot be used now; None if it can."""
        return None

    def release(self) -> None:
        """Lets go of the parameters: another object takes over. They stay where they are."""
        self.context.on_join.pop(id(self), None)
        self.context.survivors.pop(id(self), None)
        if self.reducer is not None:
            self.reducer.release()

    @property
    def in_flight(self) -> bool:
        """Whether gradients are being reduced."""
        return self.reducer is not None and self.reducer.in_flight

    @property
    def done(self) -> bool:
        """Whether this step's gradients are reduced already."""
        return self.reducer is not None and self.reducer.done

    @property
    def ready(self) -> bool:
        """Whether gradients wait to be reduced."""
        return self.reducer is not None and self.reducer.ready

    @property
    def final(self) -> bool:
        """Whether gradients are those that `step()` will use."""
        return self.reducer is None or self.reducer.final

    @property
    def accumulates(self) -> bool:
        """Whether backward passes only add to gradients."""
        return self.reducer is not None and self.reducer.accumulates

    @accumulates.setter
    def accumulates(self, accumulates: bool) -> None:
        if self.reducer is not None:
            self.reducer.accumulates = accumulates

    def clip(self, limit: float, kind: float, strict: bool) -> torch.Tensor:
        """Scales the gradients that `step()` will use so that their norm is at most `limit`; the norm before.
        Collective."""
        if self.active:
            self.meet()
        if self.reducer is not None:
            return self.reducer.clip(limit, kind, strict)
        return torch.nn.utils.clip_grad_norm_(self.parameters, limit, kind, strict)

    def synchronize(self) -> None:
        """Waits until gradients are reduced within the group. Collective."""
        if self.active:
            self.meet()
        if self.reducer is not None:
            self.reducer.synchronize()

    def reset(self) -> None:
        """Begins a new cycle: this one's gradients have been used, or replaced."""
        if self.reducer is not None:
            self.reducer.reset()

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, synchronize: bool) -> Any:
        """Steps the optimizer and does what is to follow."""
        if not self.active:
            return self._guarded(optimizer).step(closure)
        result = self._step(optimizer, closure, synchronize)
        self.end_step()
        return result

    def end_step(self) -> None:
        """What follows a step, also one that was left out."""
        epoch = self.context.epoch
        try:
            with self.context.plainly():
                self.after_step()
            self.context.fruitless = 0
        except LOSSES as error:
            recover(self.context, error, epoch)

    def _step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, synchronize: bool) -> Any:
        """Steps the optimizer."""
        optimizer = self._guarded(optimizer)
        if self.reducer is not None:
            return self.reducer.step(optimizer, closure, synchronize)
        return optimizer.step(closure)  # type: ignore[arg-type]

    def _guarded(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer, which with check_finite judges gradients before its step."""
        return self.settings.guarded(optimizer, self.reset)
