"""Accelerate: `SordinoAccelerator(algorithm="local-sgd")` replaces `Accelerator()`; the rest of a script is unchanged.

Without an algorithm, `prepare` wraps models in DDP over the process group "sordino". With one, it leaves models as they
are, and wraps optimizers in `DistributedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed

from sordino.algorithms import Algorithm, resolve
from sordino.errors import UsageError
from sordino.integrations import launch
from sordino.integrations.mean import MeanModel, settle
from sordino.integrations.optimizer import FrameworkOptimizer, broadcast, wrapped
from sordino.torch.arguments import parameters_of

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import PartialState
except ImportError as error:
    raise ImportError("sordino.integrations.accelerate needs Accelerate: pip install 'sordino[accelerate]'") from error

__all__ = ["SordinoAccelerator"]


class SordinoAccelerator(Accelerator):  # type: ignore[misc]
    """`Accelerator` for the ranks of `sordino run`, mpirun, torchrun or `accelerate launch`.

    It makes the process group "sordino" before Accelerate would make one of gloo, so create it before any other object
    of Accelerate. Collective.

    With an algorithm, the parameters and buffers of rank 0 are copied to all ranks when a model is prepared. An
    optimizer is prepared together with its model, or after it.

    Args:
        *arguments: as for `Accelerator`.
        algorithm: an algorithm of `sordino.algorithms` or its name; None for DDP.
        **named: as for `Accelerator`.

    Raises:
        UsageError: the algorithm is unknown, or as `sordino.torch.init`.
    """

    def __init__(self, *arguments: Any, algorithm: Algorithm | str | None = None, **named: Any) -> None:
        launch.join()
        super().__init__(*arguments, **named)
        self._take(algorithm)

    @classmethod
    def adopt(cls, accelerator: Accelerator, algorithm: Algorithm | str | None) -> None:
        """Convert an accelerator that has prepared nothing yet to this class."""
        accelerator.__class__ = cls
        accelerator._take(algorithm)

    def _take(self, algorithm: Algorithm | str | None) -> None:
        self._algorithm = None if algorithm is None else resolve(algorithm)
        self.mean_model = MeanModel()
        self._arriving: list[torch.nn.Module] = []
        distributed: Any = torch.distributed
        if distributed.is_initialized():
            PartialState().backend = self.state.backend = distributed.get_backend()  # Accelerate assumes gloo on CPUs

    # ---- prepare ---------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, **named: Any) -> Any:
        if self._algorithm is None:
            return super().prepare(*objects, **named)
        self._arriving = [one for one in objects if isinstance(one, torch.nn.Module)]
        for module in self._arriving:
            broadcast(module)  # before any optimizer is wrapped, which may precede its model in `objects`
        try:
            return super().prepare(*objects, **named)
        finally:
            self._arriving = []

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        trained = self._algorithm is not None and not evaluation_mode
        if trained and model not in self._arriving:
            broadcast(model)
        # Accelerate does not wrap in DDP a model that is prepared for evaluation.
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode or trained)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        if self._algorithm is not None and not isinstance(optimizer, (AcceleratedOptimizer, FrameworkOptimizer)):
            known = dict.fromkeys([*self._models, *self._arriving])
            modules = [one for one in known if _shares(one.parameters(), optimizer)]
            if not modules:
                raise UsageError(
                    "prepare(optimizer): its model is not prepared yet, so ranks may have different parameters. "
                    "Prepare both together: model, optimizer = accelerator.prepare(model, optimizer)"
                )
            optimizer = wrapped(optimizer, modules, self._algorithm)
        return super().prepare_optimizer(optimizer, device_placement)

    def distributed_optimizers(self, model: torch.nn.Module) -> list[FrameworkOptimizer]:
        """Return the optimizers with an algorithm that have parameters of this model."""
        inner = [getattr(one, "optimizer", one) for one in self._optimizers]
        return [one for one in inner if type(one) is FrameworkOptimizer and _shares(model.parameters(), one)]

    # ---- the loop --------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Let backward passes within the block only add to this rank's gradients."""
        with ExitStack() as stack:
            stack.enter_context(super().no_sync(model))
            for optimizer in self.distributed_optimizers(model):
                stack.enter_context(optimizer.no_sync())
            yield

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip gradients. If they are all gradients of one optimizer with an algorithm, that optimizer clips them."""
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        keys = {id(one) for one in chosen if one.requires_grad}
        for model in self._models:
            for optimizer in self.distributed_optimizers(model):
                if keys == {id(one) for one in parameters_of(optimizer._inner) if one.requires_grad}:
                    self.unscale_gradients()
                    return optimizer.clip_grad_norm_(max_norm, norm_type)
        clipped: torch.Tensor | None = super().clip_grad_norm_(chosen, max_norm, norm_type)
        return clipped

    # ---- models that differ between ranks --------------------------------------------------------------------------

    def averaged(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context manager in which the model is the mean over ranks, for evaluation. Collective.

        Use it between steps. The model stays this rank's own if ranks have equal models, or if the algorithm's peers
        may use its parameters at any time (`ADPSGD`, `ScheduledPull`).
        """
        return self.mean_model.inside(model, self.distributed_optimizers(model))

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state dict for a checkpoint: the mean over ranks. Collective. `save_state` calls it."""
        if self._algorithm is None:
            state: dict[str, Any] = super().get_state_dict(model, unwrap)
            return state
        return self.mean_model.state_dict(model, self.distributed_optimizers(model))

    def end_training(self) -> None:
        """Give all ranks the mean model, and end trackers. Collective."""
        for model in self._models:
            settle(model, self.distributed_optimizers(model))
        super().end_training()


def _shares(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> bool:
    """Return whether some of the parameters belong to the optimizer."""
    groups = getattr(optimizer, "_inner", optimizer).param_groups
    keys = set(map(id, chain.from_iterable(group["params"] for group in groups)))
    return any(id(parameter) in keys for parameter in parameters)
