"""What strategies have in common that change parameters beside the optimizer: they count its steps, and exchanges.

Where ranks go on without those that are lost, an exchange in which one is lost does not take place: parameters are as
before it, and all that are left take the mean of theirs. Exchanges are counted, so that all go on with the same. All of
that is here, once; where a loss ends the job it costs nothing.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sordino.algorithms.base import Algorithm
from sordino.algorithms.strategy import Closure, Runtime, Strategy
from sordino.errors import UsageError
from sordino.runtime.autograd import allreduce
from sordino.runtime.context import Recoverable, members_of
from sordino.runtime.devices import HOST
from sordino.runtime.operation import Max
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.recovery import LOSSES, again, recover, together
from sordino.runtime.reducer import GradientReducer
from sordino.runtime.rollback import Rollback, take_mean


class ExchangingStrategy(Strategy):
    """What makes the steps of an optimizer those of an algorithm that exchanges parameters.

    An algorithm says what it makes when the ranks meet (`attach`), what precedes a step (`before_step`) and what
    follows it (`after_step`), and does what it exchanges within `exchange`.

    Attributes:
        steps: that the optimizer has taken.
        round: exchanges so far.
        active: whether there are others.
    """

    steps_always = True
    levels = True
    """Whether those that are left after a loss take the mean of their parameters."""
    whole_models = True
    """Whether exchanges change all trained parameters, which are found when the ranks meet."""
    takes_in_unfrozen = True
    """Whether ranks can meet anew for parameters that are unfrozen later."""

    def __init__(self, runtime: Runtime, algorithm: Algorithm) -> None:
        super().__init__(runtime, algorithm)
        self.asked = algorithm
        self.algorithm = self._fitted()
        self.active = self._has_others()
        self.buffers = list(runtime.buffers)
        self.steps = self.round = 0
        self._met = False
        self._frozen: list[int] = []  # parameters that are left out of exchanges, because they are not trained
        self._floor = 0  # exchanges before this one are over
        self._furthest = 0  # steps that one of the ranks had taken when they met last
        self._rollback = Rollback(self.context)
        self._exchanging = False
        self.prepare()
        if runtime.compare and self.active:
            self.meet()

    def _fitted(self) -> Algorithm:
        before, now = self.settings.members, members_of(self.context, self.settings.process_set)
        return self.asked if len(now) == len(before) or not now else self.asked.fitted(before, now)

    def _has_others(self) -> bool:
        return self.context.size > 1 and bool(self.settings.process_set.included())

    # ---- what an algorithm says --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make what the algorithm keeps, before the ranks meet; called again when they meet anew."""

    @abstractmethod
    def attach(self) -> None:
        """Make what exchanges need. Collective."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what precedes a step, where there are others."""

    @abstractmethod
    def after_step(self) -> None:
        """Count a step, also one that was left out because gradients were infinite, and do what is to follow it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what `DistributedOptimizer.state_dict()` keeps of the algorithm."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict()` was taken."""

    def carried_state(self) -> dict[str, Any]:
        """Return what of the state is as good when ranks have been lost."""
        return self.state_dict()

    def before_join(self) -> None:
        """Do what others will ask for after this rank has joined. UsageError if it cannot stand in with nothing."""
        raise UsageError(
            f"join() cannot stand in for a worker of {self.label}: give all ranks the same number of steps"
        )

    def exchange(self, tensors: Sequence[torch.Tensor], work: Callable[[], None]) -> None:
        """Count an exchange, and do it: `work()`, which changes `tensors`.

        All that ranks say to each other for it is part of `work()`, so that those left after a loss do all of it or
        nothing.
        """
        if not self.context.outlasts:
            work()
        elif self.round >= self._floor:
            self._exchanging = True
            try:
                with self._rollback.around(tensors):
                    self._level_group(tensors)
                    work()
            except LOSSES:
                raise  # it counts as one that all have behind them
            except BaseException:
                self._exchanging = False
                raise
            self._exchanging = False
        self.round += 1

    @property
    def label(self) -> str:
        """The algorithm's name, for messages."""
        return self.algorithm.label

    # ---- meeting -----------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Find the other ranks, the first time it is called. Collective."""
        if not self._met:
            together(self.context, self.settings.process_set, self._meet_all, self._part)

    def _meet_all(self) -> None:
        self.algorithm = self._fitted()
        if self.active:
            self.settings.agreement.meet(self.context)
            self._frozen = [i for i, parameter in enumerate(self.parameters) if not parameter.requires_grad]
            self.attach()
        elif self.reducer is not None:  # this rank is alone
            self.reducer.release()
            self.reducer = None
        self._met = True
        self.context.on_join[id(self)] = weakref.WeakMethod(self.before_join)
        if self.context.outlasts:
            self.context.recoverables[id(self)] = Recoverable(
                weakref.WeakMethod(self.renew),
                weakref.WeakMethod(self.give_up),
                self.context.lasting_name(self.settings.agreement.name, self.settings.process_set),
                self.settings.process_set,
            )

    def _part(self, keeps_place: bool = False) -> None:
        """Undo a meeting; with `keeps_place` for another one, after which this is to be recovered as before."""
        state = self.carried_state()
        recoverable = self.context.recoverables.get(id(self))
        reducer, self.reducer = self.reducer, None  # which may be at work
        self.detach()
        if keeps_place and recoverable is not None:
            self.context.recoverables[id(self)] = recoverable
        self.settings.agreement.part()
        self.prepare()
        self._met = False
        self.load_state_dict(state)
        self.reducer = reducer
        self.active = self._has_others()

    def reduce_within(self, process_set: ProcessSet) -> None:
        """Have gradients averaged over these ranks from now on."""
        if self.reducer is not None:
            self.reducer.regroup(process_set)
            return
        everybody = self.settings.process_set
        within = replace(self.settings, process_set=process_set)
        self.reducer = GradientReducer(self.context, self.names, self.parameters, within, True, everybody)

    def detach(self) -> None:
        self.context.on_join.pop(id(self), None)
        self.context.recoverables.pop(id(self), None)
        super().detach()

    # ---- losses ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def renew(self) -> None:
        """Go on among those that are left. Collective."""
        round = self.round + int(self._exchanging)
        self.give_up()
        self._part(keeps_place=True)
        self._meet_all()
        self.round = round
        if not self.active:
            return
        if self.levels:
            self.level([tensor.detach() for tensor in self.exchanged])
        mine = torch.tensor([self.round, self.steps], device=HOST)
        furthest = allreduce(mine, op=Max, name=f"{self.label}.furthest", process_set=self.settings.process_set)
        self._floor, self._furthest = furthest.tolist()

    @property
    def exchanged(self) -> list[torch.Tensor]:
        """The tensors that exchanges change: trained parameters, and buffers that are averaged along with them.

        They are those of the last meeting. A parameter that has been frozen since is still among them.
        """
        return [*self.trained, *(buffer for _, buffer in self.buffers)]

    @property
    def exchanged_names(self) -> list[str]:
        """The names of `exchanged`."""
        left_out = set(self._frozen)
        names = [name for i, name in enumerate(self.names) if i not in left_out]
        return [*names, *(f"buffer {name}" for name, _ in self.buffers)]

    @property
    def trained(self) -> list[torch.Tensor]:
        """The parameters among `exchanged`."""
        left_out = set(self._frozen)
        return [parameter for i, parameter in enumerate(self.parameters) if i not in left_out]

    def _unfrozen(self) -> str | None:
        """Return the name of a parameter that is trained, and was left out of exchanges because it was not."""
        for i in self._frozen if self.whole_models else ():
            if self.parameters[i].requires_grad:
                return self.names[i]
        return None

    def _take_in_unfrozen(self, optimizer: torch.optim.Optimizer) -> None:
        """Meet anew where parameters have been unfrozen, which all ranks unfreeze at one step, to exchange them too.

        That is before the step in which they move first.

        Raises:
            UsageError: the algorithm cannot take them in.
        """
        name = self._unfrozen()
        if name is None:
            return
        if not self.takes_in_unfrozen:
            raise UsageError(
                f"'{name}' was frozen when the ranks met, so {self.label} leaves it out of its averages, and now it is "
                f"trained. {self.label} cannot take it in, because its ranks are not at one step. Unfreeze it before "
                "the first step, or wrap the optimizer anew afterwards, on all ranks"
            )

        def meet_anew() -> None:
            self.settle(optimizer)
            round = self.round
            self._part(keeps_place=True)
            self._meet_all()
            self.round = round

        self.do_together(meet_anew)

    @torch.no_grad()
    def give_up(self) -> None:
        """Undo an exchange that the loss of a rank has interrupted."""
        self._rollback.go_back(self.exchanged)
        self._exchanging = False

    def level(self, tensors: list[torch.Tensor]) -> None:
        """Give all ranks the mean of theirs. Collective."""
        with self._rollback.around(tensors):
            take_mean(tensors, f"{self.label}.level", self.settings.process_set)

    def _level_group(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the models of a group one again where it is not the first.

        The ranks have come to it with the momenta of others, and some with a step that others had taken before.
        """
        group = self.replicas
        if self.context.epoch > 0 and group is not None and len(group.ranks or []) > 1:
            take_mean(tensors, f"{self.label}.group", group)

    @property
    def replicas(self) -> ProcessSet | None:
        """The ranks that have one model together."""
        return None if self.reducer is None else self.reducer.settings.process_set

    def ranks_of_model(self) -> ProcessSet | None:
        if self.active:
            self.meet()
        return None if self.reducer is None else self.reducer.settings.process_set

    def do_together(self, work: Callable[[], None]) -> None:
        """Do `work()`, which is collective, so that it is completed or repeated by all that are left."""
        if self.active:
            together(self.context, self.settings.process_set, work)
        else:
            work()

    # ---- steps -------------------------------------------------------------------------------------------------

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.active:
            return
        if not self._met:
            self.meet()
        elif self._frozen:
            self._take_in_unfrozen(optimizer)
        if self.context.outlasts:
            again(self.context, lambda: self._begin_if_active(optimizer))
        else:
            self.before_step(optimizer)

    def _begin_if_active(self, optimizer: torch.optim.Optimizer) -> None:
        if self.active:
            self.before_step(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        self.begin(optimizer)
        return self.step_begun(optimizer, closure, synchronize)

    def step_begun(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        if not self.active:
            return self.guarded(optimizer).step(closure)
        result = self.step_optimizer(optimizer, closure, synchronize)
        self.end()
        return result

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        """Step the optimizer."""
        if self.settings.finite is not None:
            optimizer = self.guarded(optimizer)
        if self.reducer is not None:
            return self.reducer.step(optimizer, closure, synchronize)
        return optimizer.step(closure)  # type: ignore[arg-type]

    def guarded(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimizer, which with check_finite judges gradients before its step."""
        return self.settings.guarded(optimizer, self.reset)

    def leave_out(self) -> None:
        self.reset()
        self.end()

    def end(self) -> None:
        """Do what follows a step, also one that was left out."""
        if not self.active:  # or not any more
            return
        if not self.context.outlasts:
            self.after_step()
            return
        epoch = self.context.epoch
        try:
            with self.context.plainly():
                self.after_step()
            self.context.fruitless = 0
        except LOSSES as error:
            recover(self.context, error, epoch)

    def synchronize(self) -> None:
        if self.active:
            self.meet()
        super().synchronize()

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        if self.active:
            self.meet()
        return super().clip(max_norm, norm_type, error_if_nonfinite)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        self.drain(optimizer)

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def optional_state(self) -> frozenset[str]:
        """What of the state a checkpoint may lack."""
        return frozenset()

    def check_state(self, state: dict[str, Any]) -> None:
        missing = self.state_dict().keys() - state.keys() - self.optional_state
        if missing:
            raise UsageError(f"this is not a state of {self.label}: it lacks {', '.join(sorted(missing))}")

    def go_on_from(self, state: dict[str, Any]) -> None:
        self._floor = self._furthest = 0
        self.load_state_dict(state)

    def take_over(self, old: Strategy) -> None:
        state = old.state_dict()
        if state is not None:
            self.load_state_dict(state)
