"""Base class of algorithms, and the properties that the rest of the package reads from it.

An algorithm is one module that describes itself completely. All other code uses only two classes, `Algorithm` and
`Strategy` (strategy.py), and never tests for a particular algorithm.

`Algorithm` is a frozen dataclass whose fields are hyper-parameters. The user constructs it, ranks compare it, and a
checkpoint names it. Its constructor and `traffic` need neither torch nor a world.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from sordino.algorithms.checks import check_kinds
from sordino.errors import UsageError
from sordino.suggestions import meant

if TYPE_CHECKING:
    from typing_extensions import Self

    from sordino.algorithms.strategy import Runtime, Strategy
    from sordino.algorithms.traffic import Model, Traffic
    from sordino.runtime.exchange.helpers import Helpers, Service
    from sordino.runtime.gradients.options import Options


@dataclass(frozen=True)
class Traits:
    """Properties of an algorithm that other code may ask for.

    Attributes:
        synchronous: all workers take their steps together. If False, no worker waits for the step of another, and each
            worker acts alone on an error that it finds.
        same_gradients: a step uses the same gradients on all workers.
        late: workers use parameters or gradients of peers from an earlier step.
        averages_buffers: `named_buffers` are averaged along with the parameters.
        takes_op: gradients can be reduced by any `op=`, not by the mean alone.
        sends_gradients: gradients are sent, so compression= and groups= have an effect.
        bucket_bytes: gradients are reduced in buckets of up to this many bytes.
        ends_with: name, for an error message, of the setting that prevents the remaining ranks from continuing after a
            loss; None: they can continue.
        whole_parameters: reason, for an error message, why the algorithm cannot train parameters that are sharded over
            a device mesh (`mesh=`); None: it can, because it exchanges local shards.
    """

    synchronous: bool = True
    same_gradients: bool = False
    late: bool = False
    averages_buffers: bool = False
    takes_op: bool = False
    sends_gradients: bool = True
    bucket_bytes: int = 16 * 1024 * 1024
    ends_with: str | None = None
    whole_parameters: str | None = "it has not been written for them (Traits.whole_parameters)"


@dataclass(frozen=True)
class Simulation:
    """Description of the simulation of an algorithm by `sordino simulate`.

    Attributes:
        world: name in `sordino.simulate.command.WORLDS`, or "module:Class", of the class that runs workers in virtual
            time if they do not take their steps together; None: they do, and `Algorithm.traffic` describes each step.
        arrays: name in `sordino.simulate.vectorized.NUMERICS`, or "module:Class", of the class that applies a step to
            the parameters of all workers at once; None: every worker is a thread with the real optimizer, also in a
            simulation without data.
        imitated: the settings that `arrays` imitates.
        refused: settings that have no meaning in a simulation, each with the reason.
        modes: variants to compare, by name, each with its settings as in `--set`. Used if none of these settings is
            given.
    """

    world: str | None = None
    arrays: str | None = None
    imitated: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, Sequence[str]] = field(default_factory=dict)


class HelperRoles(Protocol):
    """Division of ranks into workers, which train, and helpers, which have no model."""

    @property
    def workers(self) -> list[int]:
        """The ranks that train."""
        ...

    @property
    def helpers(self) -> list[int]:
        """The ranks that have no model."""
        ...


class _Checked(ABCMeta):
    """Metaclass of algorithms: it checks the names and types of settings before the class checks their values.

    An unknown setting raises a TypeError that suggests the nearest name. A wrong type in place of a number, a bool or
    None raises a UsageError.
    """

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        known = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        if all(one.kind is not one.VAR_KEYWORD for one in known.values()):
            for name in settings.keys() - known.keys():
                others = [one for one in known if one != "self"]
                near = meant(name, others)
                raise TypeError(f"{cls.__name__} has no setting {name!r}; it has: {', '.join(others)}{near}")
        if is_dataclass(cls):
            check_kinds(cls, dict(zip((one for one in known if one != "self"), values)) | settings)
        return super().__call__(*values, **settings)


@dataclass(frozen=True)
class Algorithm(metaclass=_Checked):
    """Base class of algorithms. Every subclass is a frozen dataclass."""

    steps: ClassVar[str] = ""
    """Name of the strategy's module and class, with a colon between.

    The module, and torch with it, is imported only when an optimizer is wrapped.
    """
    simulation: ClassVar[Simulation] = Simulation()
    former_labels: ClassVar[tuple[str, ...]] = ()
    """Labels in checkpoints of earlier versions, which can be loaded."""
    always_written: ClassVar[tuple[str, ...]] = ()
    """Settings that `written` includes even if they have their defaults."""
    parts: ClassVar[Mapping[str, type]] = {}
    """Dataclass of each setting that has settings of its own, by the name of the setting."""

    @property
    def label(self) -> str:
        """The algorithm's name, for messages."""
        return type(self).__name__

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """Properties that other code may ask for."""

    @property
    def workers_in_group(self) -> int:
        """Number of neighboring ranks that train as one worker."""
        return 1

    def models(self, size: int) -> int:
        """Return the number of different models among `size` ranks between two exchanges."""
        return 1 if self.traits.same_gradients else size // self.workers_in_group

    def written(self) -> str:
        """Return the algorithm as Python source: its name, and the settings that differ from the defaults."""
        chosen = [
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)
            if one.name in self.always_written or getattr(self, one.name) != one.default
        ]
        return f"{self.label}({', '.join(chosen)})"

    # ---- what it does ------------------------------------------------------------------------------------------

    def strategy(self, runtime: Runtime) -> Strategy:
        """Return the strategy that runs this algorithm in one optimizer on one rank."""
        strategy: Strategy = made(self.steps, runtime, self)
        return strategy

    @abstractmethod
    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        """Return the operations of a step, with their bytes, and the steps in which they run.

        Args:
            model: the names and sizes of the tensors that are trained.
            nodes: the node of each worker.

        Raises:
            UsageError: the algorithm does not work with this number of workers.
        """

    def check(self, options: Options) -> None:
        """Raise UsageError for options of `DistributedOptimizer` that have no meaning for the algorithm."""
        traits = self.traits
        if not traits.takes_op and not options.averages:
            raise UsageError(f"{self.label} always averages; op= needs AllReduce")
        if traits.sends_gradients:
            return
        if options.compresses:
            own = any(one.name == "compression" for one in fields(self))
            instead = f". Use {self.label}(compression=...)" if own else ""
            raise UsageError(f"compression= has no effect: {self.label} without groups sends no gradients{instead}")
        if options.groups is not None or options.gradient_predivide_factor != 1.0:
            raise UsageError(f"groups and gradient_predivide_factor have no effect: {self.label} sends no gradients")

    def check_simulation(self, workers: int) -> None:
        """Raise UsageError for settings that cannot be simulated, besides the settings in `simulation.refused`."""

    def fitted(self, before: Sequence[int], now: Sequence[int]) -> Self:
        """Return the same algorithm, adapted to the present members, after ranks were lost or have joined.

        Args:
            before: the members that the algorithm was chosen for, by numbers that never change.
            now: the present members, in order.
        """
        return self

    @classmethod
    def candidates(cls, nodes: Sequence[int], interval: int) -> list[Algorithm]:
        """Return the settings that `sordino plan` compares for ranks on these nodes.

        Args:
            nodes: the node of each rank.
            interval: steps between averagings, for algorithms that do not determine it themselves.
        """
        return [cls()]

    # ---- ranks without a model ---------------------------------------------------------------------------------

    @property
    def dedicated(self) -> bool:
        """Whether some ranks have no model and serve the workers."""
        return False

    def roles(self, nodes: Sequence[int]) -> HelperRoles:
        """Return which ranks train and which help.

        Args:
            nodes: the node of each rank.

        Raises:
            UsageError: the ranks cannot be divided in this way.
        """
        raise UsageError(f"{self.label} has no ranks without a model")

    def helped_alike(self, other: Algorithm) -> bool:
        """Return whether helpers that were started for this algorithm can also serve `other`."""
        return False

    def open_service(self, helpers: Helpers, description: Any) -> Service:
        """Return the service that a helper runs. Collective over workers and helpers.

        Args:
            helpers: the workers and helpers of the job.
            description: description of the work, sent by the workers.

        Raises:
            UsageError: the algorithm has no ranks without a model.
        """
        raise UsageError(f"{self.label} has no ranks without a model")


def load(where: str) -> Any:
    """Return the object that "module:name" names."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def made(where: str, *arguments: Any) -> Any:
    """Return the result of calling the class or function "module:name" with these arguments."""
    return load(where)(*arguments)


def group_size_among(group_size: int, size: int) -> int:
    """Return the largest group size, at most `group_size`, that divides `size`."""
    return max(members for members in range(1, group_size + 1) if size % members == 0)
