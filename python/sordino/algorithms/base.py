"""An algorithm is one module that says everything about itself.

Everybody else talks to two small classes, `Algorithm` and `Strategy` (strategy.py), and never asks which algorithm it
is.

`Algorithm` is what the user writes, what ranks compare and what a checkpoint names: a frozen dataclass whose fields are
hyper-parameters. Neither torch nor a world is needed to make one, or to ask it what it sends.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from sordino.errors import UsageError
from sordino.slips import meant

if TYPE_CHECKING:
    from typing_extensions import Self

    from sordino.algorithms.strategy import Runtime, Strategy
    from sordino.algorithms.traffic import Model, Traffic
    from sordino.runtime.helpers import Helpers, Service
    from sordino.runtime.options import Options


@dataclass(frozen=True)
class Traits:
    """What others may ask of an algorithm.

    Attributes:
        synchronous: all workers take their steps together. If not, nobody waits for another one's step, and what a
            worker finds wrong it decides alone.
        same_gradients: a step uses the same gradients on all workers.
        late: what workers use of each other is of an earlier step.
        averages_buffers: `named_buffers` are averaged along with the parameters.
        takes_op: it reduces gradients by whatever `op=` says, not by the mean alone.
        sends_gradients: compression= and groups= have something to act on.
        bucket_bytes: gradients are reduced in buckets of up to this many bytes.
        ends_with: what keeps the others from going on when a rank is lost, as an error calls it; None: nothing.
    """

    synchronous: bool = True
    same_gradients: bool = False
    late: bool = False
    averages_buffers: bool = False
    takes_op: bool = False
    sends_gradients: bool = True
    bucket_bytes: int = 16 * 1024 * 1024
    ends_with: str | None = None


@dataclass(frozen=True)
class Simulation:
    """How `sordino simulate` runs an algorithm.

    Attributes:
        world: "module:Class" of what runs workers that do not take their steps together, in virtual time; None: they
            do, and the time of a step is that of its traffic.
        arrays: "module:Class" of what does to the parameters of all workers at once what a step does to them; None:
            without data, too, every worker is a thread with the real optimizer.
        imitated: the settings that `arrays` imitates.
        refused: settings that mean nothing in a simulation, and why.
        modes: what is compared with each other, by settings as of `--set`, if none of these settings is given.
    """

    world: str | None = None
    arrays: str | None = None
    imitated: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, Sequence[str]] = field(default_factory=dict)


class HelperRoles(Protocol):
    """Who trains, and who helps without a model."""

    @property
    def workers(self) -> list[int]:
        """Return the ranks that train."""
        ...

    @property
    def helpers(self) -> list[int]:
        """Return the ranks that have no model."""
        ...


class _Suggesting(ABCMeta):
    """Metaclass of algorithms: a misspelt setting is a TypeError that names the nearest one."""

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        known = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        if all(one.kind is not one.VAR_KEYWORD for one in known.values()):
            for name in settings.keys() - known.keys():
                others = [one for one in known if one != "self"]
                near = meant(name, others)
                raise TypeError(f"{cls.__name__} has no setting {name!r}; it has: {', '.join(others)}{near}")
        return super().__call__(*values, **settings)


@dataclass(frozen=True)
class Algorithm(metaclass=_Suggesting):
    """A way of training together; every subclass is a frozen dataclass."""

    steps: ClassVar[str] = ""
    """Module and class of the strategy, a colon between; imported, and torch with it, when an optimizer is wrapped."""
    simulation: ClassVar[Simulation] = Simulation()
    told: ClassVar[tuple[str, ...]] = ()
    """Settings that are written out although they have their defaults."""
    parts: ClassVar[Mapping[str, type]] = {}
    """The dataclasses of settings that have settings of their own."""

    @property
    def label(self) -> str:
        """The algorithm's name, for messages."""
        return type(self).__name__

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What others may ask."""

    @property
    def workers_in_group(self) -> int:
        """Neighbouring ranks that train as one worker."""
        return 1

    def models(self, size: int) -> int:
        """Return how many models differ, among `size` ranks, between two exchanges."""
        return 1 if self.traits.same_gradients else size // self.workers_in_group

    def written(self) -> str:
        """Return the algorithm as a script has it: its name, and the settings that differ from the defaults."""
        chosen = [
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)
            if one.name in self.told or getattr(self, one.name) != one.default
        ]
        return f"{self.label}({', '.join(chosen)})"

    # ---- what it does ------------------------------------------------------------------------------------------

    def strategy(self, runtime: Runtime) -> Strategy:
        """Return what makes the steps of an optimizer those of this algorithm."""
        strategy: Strategy = made(self.steps, runtime, self)
        return strategy

    @abstractmethod
    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        """Return who sends how much to whom, and when.

        Args:
            model: what is trained.
            nodes: the node of each worker.

        Raises:
            UsageError: the algorithm cannot serve so many workers.
        """

    def check(self, options: Options) -> None:
        """Raise UsageError for options of `DistributedOptimizer` that mean nothing to the algorithm."""
        traits = self.traits
        if not traits.takes_op and not options.averages:
            raise UsageError(f"{self.label} averages; op= is for AllReduce")
        if traits.sends_gradients:
            return
        if options.compresses:
            raise UsageError(f"compression= is for gradients, and {self.label} without groups sends none")
        if options.groups is not None or options.gradient_predivide_factor != 1.0:
            raise UsageError(f"groups and gradient_predivide_factor are for gradients, and {self.label} sends none")

    def check_simulation(self, workers: int) -> None:
        """Raise UsageError for settings that `sordino simulate` cannot have, beyond those that `simulation` refuses."""

    def fitted(self, before: Sequence[int], now: Sequence[int]) -> Self:
        """Return the same algorithm for those that are left of the members that it was chosen for.

        Args:
            before: the members that it was chosen for, by numbers that they keep.
            now: those that are left, in order.
        """
        return self

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        """Return the settings that `sordino plan` compares for ranks on these nodes.

        Args:
            nodes: the node of each rank.
            interval: of averagings, where the algorithm does not say which is best.
        """
        return [cls()]

    # ---- ranks without a model ---------------------------------------------------------------------------------

    @property
    def dedicated(self) -> bool:
        """Whether some ranks have no model and help the others."""
        return False

    def roles(self, nodes: Sequence[int]) -> HelperRoles:
        """Return who trains and who helps, of the ranks that live on these nodes.

        Raises:
            UsageError: they cannot be shared out.
        """
        raise UsageError(f"{self.label} has no ranks without a model")

    def helped_alike(self, other: Algorithm) -> bool:
        """Return whether the helpers that were made for this algorithm can help the other one."""
        return False

    def open_service(self, helpers: Helpers, told: Any) -> Service:
        """Return what a helper serves, of what the workers have told it. Collective over workers and helpers."""
        raise UsageError(f"{self.label} has no ranks without a model")


def load(where: str) -> Any:
    """Return what "module:name" names."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def made(where: str, *arguments: Any) -> Any:
    """Return what the class or function "module:name" makes of some arguments."""
    return load(where)(*arguments)


def group_size_among(group_size: int, size: int) -> int:
    """Return the largest size of groups, up to `group_size`, that divides `size` ranks."""
    return max(members for members in range(1, group_size + 1) if size % members == 0)
