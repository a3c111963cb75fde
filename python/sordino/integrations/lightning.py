"""Strategy for Lightning: `Trainer(strategy=SordinoStrategy(algorithm="local-sgd"), devices=4)`.

It is Lightning's own DDP strategy over the process group "sordino". With an algorithm it does not wrap the model, but
the optimizers that `configure_optimizers` returns. `import sordino.integrations.lightning` registers it as "sordino".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

import sordino.torch as hvd
from sordino.algorithms import Algorithm, resolve
from sordino.integrations import launch
from sordino.integrations.mean import MeanModel, settle
from sordino.integrations.optimizer import FrameworkOptimizer, broadcast, wrapped

try:
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError("sordino.integrations.lightning needs Lightning 2: pip install 'sordino[lightning]'") from error

__all__ = ["SordinoEnvironment", "SordinoStrategy"]


class SordinoEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """Environment of ranks of `sordino run` or mpirun, which Lightning does not detect. `SordinoStrategy` chooses it.

    The constructor joins the world. Collective over all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        launch.join()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))  # 0 (any) for a single rank, which no other rank has to find

    @staticmethod
    def detect() -> bool:
        return launch.is_unknown_to_frameworks()

    def world_size(self) -> int:
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        pass  # the launcher has determined it

    def global_rank(self) -> int:
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        pass  # the launcher has determined it

    def local_rank(self) -> int:
        return hvd.local_rank()

    def node_rank(self) -> int:
        return hvd.cross_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != hvd.size():
            raise ValueError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}): the launcher has started {hvd.size()} ranks. "
                f"Use devices={hvd.local_size()}, num_nodes={hvd.size() // hvd.local_size()}"
            )


class SordinoStrategy(DDPStrategy):  # type: ignore[misc]
    """Data-parallel strategy with an algorithm of Sordino, or with DDP over its process group.

    Processes are started by `sordino run`, mpirun, torchrun, Slurm or Lightning itself. The trainer's `devices` is the
    number of processes of each node.

    With an algorithm, the optimizers of `configure_optimizers` become `DistributedOptimizer`s. The parameters and
    buffers of rank 0 are copied to all ranks when a fit begins. Checkpoints hold the algorithm's state. If ranks have
    different models (gossip, local SGD), checkpoints hold their mean, validation uses it, and all ranks have it when
    the fit ends.

    Args:
        algorithm: an algorithm of `sordino.algorithms` or its name; None for DDP.
        cluster_environment: Lightning's description of the ranks; None to detect it.
        start_method: how Lightning starts processes if no launcher has: "popen", "spawn", "fork" or "forkserver".
        **options: arguments of `DistributedOptimizer`; without an algorithm, of `DDPStrategy`.

    Raises:
        UsageError: the algorithm is unknown.
    """

    strategy_name = "sordino"
    optimizers: list[torch.optim.Optimizer]

    def __init__(
        self,
        algorithm: Algorithm | str | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        start_method: str = "popen",
        **options: Any,
    ) -> None:
        if cluster_environment is None and SordinoEnvironment.detect():
            cluster_environment = SordinoEnvironment()
        super().__init__(
            cluster_environment=cluster_environment,
            process_group_backend="sordino",
            start_method=start_method,
            **(options if algorithm is None else {}),
        )
        self._algorithm = None if algorithm is None else resolve(algorithm)
        self._options = options
        self._mean = MeanModel()

    @property
    def _distributed(self) -> list[FrameworkOptimizer]:
        """Optimizers with an algorithm."""
        return [one for one in self.optimizers if isinstance(one, FrameworkOptimizer)]

    def setup_distributed(self) -> None:
        super().setup_distributed()
        hvd.init()  # in the world of the default group, even if the script has created that with another backend

    def configure_ddp(self) -> None:
        if self._algorithm is None:
            super().configure_ddp()
        else:
            broadcast(self.lightning_module)

    def setup_optimizers(self, trainer: Any) -> None:
        module = self.lightning_module
        for earlier in _strategies.pop(module, ()):
            earlier.optimizers = []  # parameters can have one DistributedOptimizer at a time
        super().setup_optimizers(trainer)
        if self._algorithm is not None:
            self.optimizers = [wrapped(one, [module], self._algorithm, **self._options) for one in self.optimizers]
            _strategies[module] = WeakSet([self])

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        if self._algorithm is not None:
            self.precision_plugin.clip_grad_by_norm = _clip_by_norm

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let backward passes within the block only add to this rank's gradients."""
        with ExitStack() as stack:
            stack.enter_context(super().block_backward_sync())
            for optimizer in self._distributed:
                stack.enter_context(optimizer.no_sync())
            yield

    # ---- models that differ between ranks --------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict for a checkpoint. Collective."""
        return self._mean.state_dict(self.lightning_module, self._distributed)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._mean.put_in(self.lightning_module, self._distributed)

    def on_validation_end(self) -> None:
        self._mean.take_out(self.lightning_module)
        super().on_validation_end()

    def on_exception(self, exception: BaseException) -> None:
        self._mean.take_out(self.lightning_module)  # an evaluation may have been cut off
        super().on_exception(exception)

    def on_train_end(self) -> None:
        settle(self.lightning_module, self._distributed)
        super().on_train_end()


def _clip_by_norm(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
    """Clip gradients by the optimizer, whose algorithm may keep them in another place."""
    optimizer.clip_grad_norm_(clip_val)  # type: ignore[attr-defined]


_strategies: WeakKeyDictionary[torch.nn.Module, WeakSet[SordinoStrategy]] = WeakKeyDictionary()
"""Strategies that have optimizers for a module. Their trainers keep them after the fit."""

if SordinoStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        SordinoStrategy.strategy_name, SordinoStrategy, description="DDP over Sordino's process group"
    )
