"""The model to evaluate and to save: the mean over ranks, if the algorithm lets their models differ.

Frameworks evaluate the model of each rank, and save that of rank 0. With gossip or local SGD these are slightly worse
than the mean, and the evaluated model would not be the saved one. Reading the mean does not change the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import sordino.torch as hvd
from sordino.integrations.optimizer import FrameworkOptimizer


class MeanModel:
    """Mean of the models of all ranks, in place of a rank's own model for a while.

    Attributes:
        is_in: whether the module has the mean now.
    """

    def __init__(self) -> None:
        self._own: dict[str, Any] | None = None
        self._mean: dict[str, Any] = {}  # values that the module has instead

    @property
    def is_in(self) -> bool:
        return self._own is not None

    def put_in(self, module: torch.nn.Module, optimizers: Sequence[FrameworkOptimizer]) -> None:
        """Replace the module's parameters and buffers by the mean. Collective, between steps.

        Does nothing if ranks have equal models, or if peers may use this rank's parameters at any time (asynchronous
        algorithms, and those with parameters in flight).
        """
        if self.is_in or not differ(optimizers) or not all(one.may_replace_model for one in optimizers):
            return
        with torch.inference_mode(False):
            own = {name: _copy(value) for name, value in module.state_dict().items()}
        mean = _mean(module)
        _fill(module, mean)
        self._own, self._mean = own, mean

    def take_out(self, module: torch.nn.Module) -> None:
        """Restore the module's own parameters and buffers. Buffers that were changed meanwhile keep their new values.

        So a module can keep results of an evaluation in buffers.
        """
        own, mean, self._own, self._mean = self._own, self._mean, None, {}
        if own is not None:
            parameters = dict(module.named_parameters(remove_duplicate=False))
            changed = {
                name: value
                for name, value in module.state_dict().items()
                if name not in parameters and isinstance(value, torch.Tensor) and not _same(value, mean[name])
            }
            _fill(module, own | changed)

    @contextmanager
    def inside(self, module: torch.nn.Module, optimizers: Sequence[FrameworkOptimizer]) -> Iterator[None]:
        """Replace the module's parameters and buffers by the mean within the block. Collective, between steps."""
        outer = self.is_in
        self.put_in(module, optimizers)
        try:
            yield
        finally:
            if not outer:
                self.take_out(module)

    def state_dict(self, module: torch.nn.Module, optimizers: Sequence[FrameworkOptimizer]) -> dict[str, Any]:
        """Return the state dict of the mean model. Collective if ranks have different models."""
        return module.state_dict() if self.is_in or not differ(optimizers) else _mean(module)


def differ(optimizers: Sequence[FrameworkOptimizer]) -> bool:
    """Return whether ranks have different models between two exchanges."""
    return any(one.models_differ for one in optimizers)


def settle(module: torch.nn.Module, optimizers: Sequence[FrameworkOptimizer]) -> None:
    """Apply updates in flight, and give all ranks the mean model. Collective, at the end of a training.

    It also removes the gradients, of which a rank may have a part only (`LocalSGD(exchange="sharded")`).
    """
    for optimizer in optimizers:
        optimizer.flush()
        optimizer.zero_grad()
    if differ(optimizers):
        _fill(module, _mean(module))


# Frameworks evaluate in inference mode, whose tensors cannot be changed outside of it.
def _mean(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict of the mean model. Tensors that share memory in the module share it here, too."""
    with torch.inference_mode(False):
        state = hvd.average_parameters(module)
        names: dict[tuple[Any, ...], str] = {}
        for name, value in module.state_dict().items():
            if isinstance(value, torch.Tensor):
                place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
                state[name] = state[names.setdefault(place, name)]
        return state


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())


def _fill(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Copy the tensors of a state dict into a module's tensors."""
    with torch.inference_mode(False), torch.no_grad():
        for name, value in module.state_dict().items():
            if isinstance(value, torch.Tensor):
                value.copy_(state[name])
