"""Base class of strategies that exchange parameters after the optimizer step (gossip, local SGD, ...).

It counts exchanges. With on_peer_lost="continue" it also undoes an exchange that a lost rank has interrupted:
parameters return to their values before the exchange, and the remaining ranks replace them by their mean. Because
exchanges are counted, all remaining ranks continue with the same exchange. If losses end the job, this costs nothing.
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
from sordino.runtime.collectives.autograd import allreduce
from sordino.runtime.collectives.operation import Max
from sordino.runtime.context import members_of
from sordino.runtime.devices import HOST
from sordino.runtime.exchange.flat_buffer import BUFFER
from sordino.runtime.exchange.rollback import Rollback, take_mean
from sordino.runtime.exchange.saved_residuals import renumbered
from sordino.runtime.gradients.reducer import GradientReducer
from sordino.runtime.local_shards import LocalShard
from sordino.runtime.loss_state import Recoverable
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.recovery.losses import LOSSES, again, recover, together


class ExchangingStrategy(Strategy):
    """Base class of strategies that exchange parameters.

    A subclass defines what is set up when the ranks meet (`attach`), what precedes a step (`before_step`) and what
    follows it (`after_step`). It performs its exchanges through `exchange`. To *meet* is to find the other ranks and to
    compare settings with them, once, before the first step.

    Attributes:
        steps: number of steps that the optimizer has taken.
        round: number of exchanges so far.
        active: whether there are other ranks.
    """

    steps_always = True
    mean_after_loss = True
    """Whether the remaining ranks take the mean of their parameters after a loss."""
    whole_models = True
    """Whether exchanges change all parameters that were trained when the ranks met."""
    takes_in_unfrozen = True
    """Whether ranks can meet again for parameters that are unfrozen later."""

    def __init__(self, runtime: Runtime, algorithm: Algorithm) -> None:
        super().__init__(runtime, algorithm)
        self.asked = algorithm
        self.algorithm = self._fitted()
        self.active = self._has_others()
        self.buffers = list(runtime.buffers)
        self.steps = self.round = 0
        self._met = False
        self.number = self.context.rank  # this rank's number at the last meeting
        # Parameters that exchanges leave out, because they were frozen when the ranks met; None before the first
        # meeting. The parameters frozen now may differ between ranks: at a loss, some ranks may be a step ahead.
        self._frozen: list[int] | None = None
        self._first_open_round = 0  # exchanges before this one are complete
        self._most_steps = 0  # highest number of steps of any rank after the last loss
        self._rollback = Rollback(self.context)
        self._exchanging = False
        self.prepare()
        if runtime.compare and self.active:
            self.meet()

    def _fitted(self) -> Algorithm:
        before, now = self.settings.members, members_of(self.context, self.settings.process_set)
        return self.asked if now == before or not now else self.asked.fitted(before, now)

    def _has_others(self) -> bool:
        return self.context.size > 1 and bool(self.settings.process_set.included())

    # ---- what an algorithm defines -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Set up the state of the algorithm before the ranks meet. Called again before they meet again."""

    def attach(self) -> None:
        """Set up what exchanges need. Collective."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a step. Called only if there are other ranks."""

    @abstractmethod
    def after_step(self) -> None:
        """Count a step, and exchange if it is time. Also called for a step skipped because of infinite gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the algorithm for `DistributedOptimizer.state_dict()`: by default, its two counters."""
        return {"steps": self.steps, "round": self.round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()`."""
        self.steps, self.round = state["steps"], state["round"]

    def carried_state(self) -> dict[str, Any]:
        """Return the part of the state that stays valid after ranks have been lost."""
        return self.state_dict()

    def forget_loaded(self) -> None:
        """Forget the loaded state of exchanges, before a step without other ranks.

        Otherwise a later checkpoint would combine it with parameters that it does not fit.
        """

    def before_join(self) -> None:
        """Prepare for `join()`, after which this rank takes no more steps but must serve the other ranks.

        Raises:
            UsageError: the algorithm needs the steps of all ranks.
        """
        raise UsageError(f"join() cannot replace a worker of {self.label}: give all ranks the same number of steps")

    def exchange(self, tensors: Sequence[torch.Tensor], work: Callable[[], None]) -> None:
        """Perform an exchange by `work()`, which changes `tensors`, and count it.

        `work()` must contain all communication of the exchange, so that the remaining ranks do all or none of it after
        a loss.
        """
        if not self.context.survives_losses:
            work()
        elif self.round >= self._first_open_round:
            self._exchanging = True
            try:
                with self._rollback.around(tensors):
                    self._level_group(tensors)
                    work()
            except LOSSES:
                # `_exchanging` stays True: `renew` undoes this exchange, and counts it because the mean replaces it.
                raise
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
        """Meet the other ranks, unless they have met. Collective the first time."""
        if not self._met:
            together(self.context, self.settings.process_set, self._meet_all, self._part)

    def _meet_all(self) -> None:
        self.algorithm = self._fitted()
        if self.active:
            if self._frozen is None:
                self._frozen = [i for i, parameter in enumerate(self.parameters) if not parameter.requires_grad]
            self.settings.check.meet(self.context, self._frozen)
            self.attach()
        elif self.reducer is not None:  # this rank is alone
            self.reducer.release()
            self.reducer = None
        self._met, self.number = True, self.context.rank
        self.context.callbacks.on_join.add(self.before_join)
        if self.context.survives_losses:
            self.context.losses.recoverables[id(self)] = Recoverable(
                weakref.WeakMethod(self.renew),
                weakref.WeakMethod(self.give_up),
                self.context.names.lasting(self.settings.check.name, self.settings.process_set),
                self.settings.process_set,
            )

    def _part(self, stays_registered: bool = False) -> None:
        """Undo a meeting. If another meeting follows, `stays_registered` keeps this object registered for recovery."""
        state = self.carried_state()
        recoverable = self.context.losses.recoverables.get(id(self))
        reducer, self.reducer = self.reducer, None  # so that `detach` does not release it: it may be running
        self.detach()
        if stays_registered and recoverable is not None:
            self.context.losses.recoverables[id(self)] = recoverable
        self.settings.check.part()
        self.prepare()
        self._met = False
        self.load_state_dict(state)
        self.reducer = reducer
        self.active = self._has_others()

    def reduce_within(self, process_set: ProcessSet) -> None:
        """Average gradients over the ranks of `process_set` from now on."""
        if self.reducer is not None:
            self.reducer.regroup(process_set)
            return
        workers = self.settings.process_set
        within = replace(self.settings, process_set=process_set)
        self.reducer = GradientReducer(self.context, self.names, self.parameters, within, True, workers)
        self.reducer.load_residuals(self._residuals)
        self._residuals = {}

    def detach(self) -> None:
        self.context.callbacks.on_join.discard(self)
        self.context.losses.recoverables.pop(id(self), None)
        super().detach()

    # ---- losses ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def renew(self) -> None:
        """Continue among the remaining ranks. Collective over them."""
        self.round += int(self._exchanging)  # before anything that a second loss may interrupt
        self.give_up()
        self._part(stays_registered=True)
        self._meet_all()
        if not self.active:
            return
        if self.mean_after_loss and self.context.losses.mean_after_loss:
            self.level([tensor.detach() for tensor in self.exchanged])
        mine = torch.tensor([self.round, self.steps], device=HOST)
        furthest = allreduce(mine, op=Max, name=f"{self.label}.furthest", process_set=self.settings.process_set)
        self._first_open_round, self._most_steps = furthest.tolist()

    @torch.no_grad()
    def give_up(self) -> None:
        """Undo an exchange that a lost rank has interrupted, if there is one."""
        self._rollback.go_back(self.exchanged)
        self._exchanging = False

    def level(self, tensors: list[torch.Tensor]) -> None:
        """Replace `tensors` on all ranks by their means. Collective."""
        with self._rollback.around(tensors):
            take_mean(tensors, f"{self.label}.level", self.settings.process_set)

    def _level_group(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the models of a group equal again, in every world but the first.

        A loss changes the groups. Members of a new group have different momenta, and some have not taken the
        interrupted step.
        """
        group = self.replicas
        if self.context.epoch > 0 and group is not None and len(group.ranks or []) > 1:
            take_mean(tensors, f"{self.label}.group", group)

    # ---- exchanged tensors -------------------------------------------------------------------------------------

    @property
    def exchanged(self) -> list[torch.Tensor]:
        """The tensors that exchanges change: trained parameters, and buffers that are averaged along with them.

        The last meeting determines them. A parameter that has been frozen since then stays included until the ranks
        meet for other parameters (`level_frozen`).
        """
        return [*self.trained, *(buffer for _, buffer in self.buffers)]

    @property
    def exchanged_names(self) -> list[str]:
        """The names of `exchanged`."""
        left_out = set(self._frozen or ())
        names = [name for i, name in enumerate(self.names) if i not in left_out]
        return [*names, *(BUFFER + name for name, _ in self.buffers)]

    @property
    def trained(self) -> list[torch.Tensor]:
        """The parameters among `exchanged`."""
        left_out = set(self._frozen or ())
        return [parameter for i, parameter in enumerate(self.parameters) if i not in left_out]

    def _take_in_unfrozen(self, optimizer: torch.optim.Optimizer) -> None:
        """Meet again if parameters have been unfrozen since the ranks met, so that exchanges include them.

        All ranks must unfreeze them at the same step. Called before the first step that changes them. At a loss, some
        ranks may have reached this call and others not, so all recover with the parameters of the last meeting.

        Raises:
            UsageError: the algorithm cannot include them.
        """
        frozen = self._frozen or []
        unfrozen = [i for i in frozen if self.parameters[i].requires_grad]
        if not unfrozen:
            return
        if not self.whole_models:
            self._frozen = [i for i in frozen if i not in unfrozen]
            return
        if not self.takes_in_unfrozen:
            name = self.names[unfrozen[0]]
            raise UsageError(
                f"'{name}' was frozen at the first step, so {self.label} does not average it, but now it is trained. "
                f"{self.label} cannot include it later, because its ranks are at different steps. Unfreeze it before "
                "the first step, or wrap the optimizer again after unfreezing it, on all ranks"
            )

        def undo() -> None:
            self._frozen = frozen

        together(self.context, self.settings.process_set, lambda: self._meet_anew(optimizer), undo)

    def _meet_anew(self, optimizer: torch.optim.Optimizer) -> None:
        """Meet for the parameters that are trained now. Collective. All ranks repeat it if a loss interrupts it."""
        self.settle(optimizer)
        self._part(stays_registered=True)
        self._frozen = None
        self._meet_all()

    @torch.no_grad()
    def level_frozen(self) -> None:
        """Replace parameters that have been frozen since the last meeting by their means. Collective.

        Exchanges after the next meeting leave them out, so ranks would keep different values permanently.
        """
        if not self._met or not self.active or self.algorithm.traits.same_gradients:
            return
        frozen = [
            parameter.local if isinstance(parameter, LocalShard) else parameter.detach()
            for parameter in self.trained
            if not parameter.requires_grad
        ]
        if frozen:
            with self._rollback.around(frozen):
                take_mean(frozen, f"{self.label}.frozen", self.settings.process_set)

    # ---- other ranks -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare_growth(self, optimizer: torch.optim.Optimizer) -> None:
        """Settle, and replace all models by their mean. A new rank starts from it, so the mean does not change."""
        super().prepare_growth(optimizer)
        if self.active and self._met:
            self.level([tensor.detach() for tensor in self.exchanged])

    @property
    def replicas(self) -> ProcessSet | None:
        """The ranks that share one model with this rank; None: no other rank does."""
        return None if self.reducer is None else self.reducer.settings.process_set

    def ranks_of_model(self) -> ProcessSet | None:
        if self.active:
            self.meet()
        return None if self.reducer is None else self.reducer.settings.process_set

    def do_together(self, work: Callable[[], None]) -> None:
        """Call `work()`, which is collective. After a loss all remaining ranks complete or repeat it."""
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
        if self.context.survives_losses:
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
            self.forget_loaded()
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
        """Return the optimizer; with check_finite, one that checks gradients before its step."""
        return self.settings.guarded(optimizer, self.reset)

    def leave_out(self) -> None:
        self.reset()
        self.end()

    def end(self) -> None:
        """Call `after_step`, also after a skipped step, and recover if a rank is lost meanwhile."""
        if not self.active:  # a loss may have left this rank alone
            return
        if not self.context.survives_losses:
            self.after_step()
            return
        epoch = self.context.epoch
        try:
            with self.context.losses.raising_on_loss():
                self.after_step()
            self.context.losses.empty_recoveries = 0
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
        self.level_frozen()

    # ---- state -------------------------------------------------------------------------------------------------

    @property
    def optional_state(self) -> frozenset[str]:
        """Keys of the state that a checkpoint may lack."""
        return frozenset()

    def check_state(self, state: dict[str, Any]) -> None:
        missing = self.state_dict().keys() - state.keys() - self.optional_state
        if missing:
            raise UsageError(f"this is not a state of {self.label}: it lacks {', '.join(sorted(missing))}")

    def go_on_from(self, state: dict[str, Any]) -> None:
        self._first_open_round = self._most_steps = 0
        self.load_state_dict(state)

    def take_over(self, old: Strategy) -> None:
        state = old.state_dict()
        if state is not None:
            before = old.number if isinstance(old, ExchangingStrategy) else self.context.rank
            self.load_state_dict(renumbered(state, before, self.context.rank))
