"""Wrapping of an optimizer: the claim on its parameters, the strategy of its steps, and changes of both.

A strategy is made for certain parameters, options and ranks. When these change, a new strategy replaces it:

| change | method | when |
|---|---|---|
| a new group of parameters | `add_param_group` | between steps |
| another option | `change_options` | between steps |
| other parameters in the wrapped optimizer | `take_in_changes` | at the beginning of `step()` |
| ranks that join or leave | `before_growth`, `after_growth` | between steps |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from sordino.algorithms.strategy import Strategy, only_a_part
from sordino.errors import ConfigurationMismatch, LayoutMismatch, StepOrderError, UsageError
from sordino.runtime.collectives.objects import broadcast_object
from sordino.runtime.exchange.saved_residuals import renumbered
from sordino.runtime.gradients.options import Options
from sordino.torch.arguments import name_parameters, parameters_of
from sordino.torch.claims import Claim
from sordino.torch.factory import make_strategy
from sordino.torch.mesh import local_shards


class Wrapping:
    """A wrapped optimizer, the claim on its parameters, and its current strategy.

    Attributes:
        optimizer: the wrapped optimizer.
        names: names of its parameters.
        options: the arguments of `DistributedOptimizer`.
        claim: the claim on the parameters.
        strategy: the current strategy.

    Args:
        optimizer: the wrapped optimizer.
        names: names of its parameters.
        options: the arguments of `DistributedOptimizer`.
        compare: whether to compare parameters and options with other ranks now (collective), or at the first step.

    Raises:
        UsageError: a parameter belongs to another wrapper, or an option does not fit.
        LayoutMismatch, ConfigurationMismatch: ranks differ.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], options: Options, compare: bool
    ) -> None:
        self.optimizer, self.names, self.options = optimizer, names, options
        self.claim = Claim(optimizer, names)
        try:
            self.strategy = self._make_strategy(compare)
        except BaseException:
            self.claim.release()  # the traceback may keep this object alive
            raise

    def _make_strategy(self, compare: bool) -> Strategy:
        parameters = parameters_of(self.optimizer)
        names = [self.names[p] for p in parameters]
        strategy = make_strategy(self.optimizer, parameters, names, self.options, compare)
        strategy.stepping = self.claim.stepping
        strategy.follow(self.claim.has_changed)
        strategy.context.callbacks.on_end.add(self._world_ended)
        strategy.context.losses.grows(self)
        return strategy

    def _world_ended(self) -> None:
        """Release the parameters, because another world may train them."""
        self.claim.release()
        if self.strategy.reducer is not None:
            self.strategy.reducer.release()

    # ---- changes -----------------------------------------------------------------------------------------------

    def require_between_steps(self, what: str) -> None:
        """Raise StepOrderError if the reduction of gradients for the next step has begun."""
        if self.strategy.in_flight or self.strategy.done:
            raise StepOrderError(f"{what} was called between backward() and step(): call it after step()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Collective, between steps.

        Raises:
            UsageError: a parameter belongs to another wrapper; the group is not added then.
        """
        with self._new_strategy():
            self.optimizer.add_param_group(param_group)
            self._update_names()
            self.claim.take(self.names)

    def change_options(self, **options: Any) -> None:
        """Replace these options. Collective, between steps."""
        with self._new_strategy():
            self.options = replace(self.options, **options)

    def take_in_changes(self) -> None:
        """Adopt the wrapped optimizer's current parameters, and reduce the gradients of new ones. Collective.

        Raises:
            UsageError: the algorithm cannot continue.
            StepOrderError: the optimizer got other parameters after backward().
            LayoutMismatch: ranks have different parameters; raised on all ranks.
        """
        old, before = self.strategy, self.names
        added = [parameter for parameter in parameters_of(self.optimizer) if id(parameter) not in self.claim.keys]
        old.before_change()
        self._update_names()
        new = None
        try:
            new = self._make_strategy(compare=True)
            self.claim.take(self.names)
        except BaseException:
            self.names = before
            if new is not None:
                new.detach()
            raise
        old.detach()
        self.strategy = new
        new.load_residuals(old.residuals() or {})
        names = [self.names[parameter] for parameter in added]
        new.after_change(names, local_shards(added, names, self.options))

    def reduce_all(self) -> None:
        """Reduce the gradients of all current parameters, as `step()` does. Collective."""
        if self.claim.has_changed():
            self.take_in_changes()
        if not self.strategy.final:
            self.strategy.synchronize()

    @contextmanager
    def _new_strategy(self) -> Iterator[None]:
        """Replace the strategy after the block, which changes parameters or options.

        If the changes are invalid or differ between ranks, they are undone, and the error is raised.
        """
        old, options, names, known = self.strategy, self.options, self.names, len(self.optimizer.param_groups)
        old.do_together(lambda: old.settle(self.optimizer))

        def undo() -> None:
            del self.optimizer.param_groups[known:]
            self.options, self.names = options, names

        try:
            yield
        except BaseException:
            undo()
            raise
        try:
            self._replace_strategy()
        except (ConfigurationMismatch, LayoutMismatch, UsageError):
            undo()
            self.claim.take(names)
            self._continue(old, compare=False)
            raise
        self.strategy.context.note_return()

    def _replace_strategy(self) -> None:
        self.strategy.detach()
        self._continue(self.strategy, compare=True)

    def _continue(self, old: Strategy, compare: bool) -> None:
        """Make a new strategy, which continues from a detached one."""
        self.strategy = self._make_strategy(compare)
        self.strategy.take_over(old)
        rank = self.strategy.context.rank
        before = rank if old.reducer is None else old.reducer.number
        self.strategy.load_residuals(renumbered(old.residuals() or {}, before, rank))

    def _update_names(self) -> None:
        """Name the optimizer's new parameters, and forget the names of removed ones.

        A new parameter is named after its place. If an older parameter has that name, a number is appended.
        """
        current = parameters_of(self.optimizer)
        gone = self.claim.keys - {id(parameter) for parameter in current}
        names = {parameter: name for parameter, name in self.names.items() if id(parameter) not in gone}
        taken = set(names.values())
        for parameter, place in name_parameters(self.optimizer, None).items():
            if parameter not in names:
                free = (place if number == 0 else f"{place}.{number}" for number in count())
                names[parameter] = next(name for name in free if name not in taken)
                taken.add(names[parameter])
        self.names = names

    # ---- ranks that join (Growing) -----------------------------------------------------------------------------

    def layout(self) -> list[str]:
        """Return lines about the model and the settings. A process that wants to join must have the same lines."""
        return self.strategy.settings.check.lines()

    def before_growth(self) -> None:
        """Bring parameters and optimizer into a state from which a new rank can start. Collective."""
        strategy = self.strategy
        with self.claim.stepping():
            strategy.do_together(lambda: strategy.prepare_growth(self.optimizer))

    def after_growth(self) -> None:
        """Continue in the grown world. Collective over all its ranks."""
        # A newcomer was alone when it chose the algorithm. So all ranks use the `members` of rank 0, an older rank.
        members = broadcast_object(self.options.members, root_rank=0)
        self.options = replace(self.options, members=members)
        self._replace_strategy()

    # ---- copies ------------------------------------------------------------------------------------------------

    def state_of_copies(self) -> dict[str, Any]:
        """Return the argument of `of_copy`. For a deep copy, the caller replaces the optimizer in it by a copy.

        Raises:
            UsageError: this rank has only a part of the optimizer's state.
        """
        self.strategy.complete()
        if self.strategy.partial_state and self.optimizer.state:
            raise only_a_part(self.options.algorithm)
        return {
            "inner": self.optimizer,
            "names": [self.names[parameter] for parameter in parameters_of(self.optimizer)],
            "options": self.options,
            "under way": self.strategy.state_of_copies(),
            "residuals": self.strategy.residuals() or {},
        }

    @classmethod
    def of_copy(cls, state: dict[str, Any]) -> Wrapping:
        """Return the wrapping of a copied or unpickled optimizer, from `state_of_copies()`. Not collective."""
        optimizer, under_way = state["inner"], state.get("under way")
        copy = cls(optimizer, dict(zip(parameters_of(optimizer), state["names"])), state["options"], compare=False)
        if under_way is not None:
            copy.strategy.go_on_from(under_way)
        copy.strategy.load_residuals(state.get("residuals", {}))
        return copy
