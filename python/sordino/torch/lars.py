"""Layer-wise adaptive rate scaling: SGD with momentum in which each tensor's step is in proportion to its norm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any

import torch

from sordino._core import Device
from sordino.errors import UsageError
from sordino.runtime.devices import core_device
from sordino.runtime.tensors import dense_strides, dtype_code
from sordino.runtime.versions import note_change

_Group = dict[str, Any]

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda value: value >= 0, "at least 0"),
    "momentum": (lambda value: 0 <= value < 1, "at least 0 and below 1"),
    "weight_decay": (lambda value: value >= 0, "at least 0"),
    "trust_coefficient": (lambda value: value > 0, "above 0"),
    "eps": (lambda value: value >= 0, "at least 0"),
}


def _check_group(group: _Group, index: int) -> None:
    """Raise UsageError that names the first wrong hyper-parameter of parameter group number `index`."""
    for name, (fits, wanted) in _RANGES.items():
        value = group[name]
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not fits(value):
            raise UsageError(f"LARS({name}={value!r}) in parameter group {index}: must be a number {wanted}")
    if group["layerwise"] not in (True, False, None):
        raise UsageError(
            f"LARS(layerwise={group['layerwise']!r}) in parameter group {index}: must be True (scale all its tensors), "
            "False (none) or None (those with more than one dimension)"
        )
    if group["nesterov"] and group["momentum"] == 0:
        raise UsageError(f"LARS(nesterov=True) in parameter group {index}: needs a momentum above 0")


def _check_parameter(parameter: torch.Tensor, gradient: torch.Tensor, index: int) -> None:
    """Raise UsageError for a parameter or gradient that LARS does not support."""
    where = f"LARS: a parameter of shape {tuple(parameter.shape)} in parameter group {index}"
    if gradient.layout != torch.strided:
        raise UsageError(
            f"{where} has a sparse gradient, but LARS needs the whole tensor for the norm and the weight decay: use "
            "sparse=False in its layer, or train it with torch.optim.SGD"
        )
    if parameter.is_complex():
        raise UsageError(f"{where} is complex: train torch.view_as_real of it")


def _rates(group: _Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[float]:
    """Return lr times the local rate of each tensor. All tensors have one device and dtype."""
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    rates = [lr] * len(parameters)
    layerwise = group["layerwise"]
    scaled = [i for i, p in enumerate(parameters) if (p.dim() > 1 if layerwise is None else layerwise)]
    if not scaled:
        return rates
    # In float16 a norm above 65 504 would be infinite; in bfloat16 it would have three digits.
    wide = torch.promote_types(parameters[0].dtype, torch.float32)
    tensors = [parameters[i] for i in scaled] + [gradients[i] for i in scaled]
    # Python numbers, because one foreach call takes them for many tensors.
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=wide)).tolist()
    for i, weight, gradient in zip(scaled, norms, norms[len(scaled) :]):
        if weight > 0 and gradient > 0:
            rates[i] = lr * group["trust_coefficient"] * weight / (gradient + decay * weight + group["eps"])
    return rates


def _alike(parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> bool:
    """Return whether parameters and gradients have the same memory layout, without gaps.

    Then kernels do not need their shapes.
    """
    return all(
        p.is_floating_point() and p.stride() == g.stride() == dense_strides(p) for p, g in zip(parameters, gradients)
    )


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose rate is scaled, per tensor, by the ratio of the norms of weights and gradient.

    For a tensor with weights w, gradient g and momentum v, which starts at zero::

        local = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)  if |w| > 0 and |g| > 0, else 1
        d = lr * local * (g + weight_decay * w)
        v = momentum * v + d
        w = w - v  (nesterov: w - d - momentum * v)

    The rate is inside v, so a change of `lr` or of the norms affects only new gradients; in `torch.optim.SGD` it is
    outside. Tensors with at most one dimension (biases, scale and shift of normalization layers) have local = 1. They
    decay like all others. To exclude them, put them in a group with `weight_decay=0`.

    Source: You, Gitman & Ginsburg 2017, "Large Batch Training of Convolutional Networks" (arXiv:1708.03888), equation 6
    and algorithm 1, with what MXNet adds (python/mxnet/optimizer/lars.py: `_get_lars`, `step` and the aggregated
    kernels): eps, local = 1 if a norm is zero, no scaling of bias, gamma and beta. MXNet identifies those by name,
    this class by the number of dimensions. Two things of MXNet are left out: its `fused_step` for single tensors
    multiplies the momentum by the ratio of the last two rates, unlike its `step` and the paper; and its base class sets
    the weight decay of biases to 0 if it has names. Nesterov's momentum is that of `torch.optim.SGD`.

    For the norms, a step reads weights and gradients once more than SGD. Norms are computed in float32 (float64 for
    float64), without a wait on a GPU. The momentum buffer has the dtype of its parameter. Parameters whose `grad` is
    None are not changed.

    Args:
        params: parameters, or groups of them. Each argument below can differ between groups, as a key of that name.
        lr: the global learning rate, gamma in the paper.
        momentum: m in the paper, in [0, 1).
        weight_decay: beta in the paper, the factor of the gradient of the L2 penalty.
        trust_coefficient: eta, the largest change of a tensor in a step of lr = 1, as a fraction of its norm.
        eps: number added to the denominator.
        nesterov: whether to use Nesterov's momentum.
        layerwise: tensors to scale: True all, False none (plain SGD), None those with more than one dimension.

    Raises:
        UsageError: a hyper-parameter is out of its range, also from `add_param_group`. From `step`, before any change:
            a gradient is sparse, or a parameter is complex.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[_Group] | Iterable[tuple[str, torch.Tensor]],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-9,
        nesterov: bool = False,
        layerwise: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "layerwise": layerwise,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: _Group) -> None:
        """Add parameters. Missing keys are taken from the constructor. A UsageError means that nothing was added."""
        _check_group({**self.defaults, **param_group}, len(self.param_groups))
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all parameters that have a gradient.

        Args:
            closure: function that computes the gradients again and returns the loss.

        Returns:
            The result of `closure`, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, parameters in list(self._batches()):  # a list, so that all are checked before the first one changes
            self._move(group, parameters)
        return loss

    def _batches(self) -> Iterator[tuple[_Group, list[torch.Tensor]]]:
        """Yield the parameters with gradients by group, device and dtype, so that one launch can take each batch."""
        for index, group in enumerate(self.param_groups):
            alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _check_parameter(parameter, parameter.grad, index)
                    alike[parameter.device, parameter.dtype].append(parameter)
            for parameters in alike.values():
                yield group, parameters

    def _move(self, group: _Group, parameters: list[torch.Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        device = core_device(parameters[0].device)
        if device is not None and _alike(parameters, gradients):
            self._move_on(device, group, parameters, gradients)
            return
        rates = _rates(group, parameters, gradients)
        if group["weight_decay"] == 0:
            changes = torch._foreach_mul(gradients, rates)
        else:
            changes = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
            torch._foreach_mul_(changes, rates)
        momentum = group["momentum"]
        if momentum == 0:
            torch._foreach_sub_(parameters, changes)
            return
        velocities = [self._velocity(p) for p in parameters]
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, changes)
        if group["nesterov"]:
            torch._foreach_add_(changes, velocities, alpha=momentum)
            torch._foreach_sub_(parameters, changes)
        else:
            torch._foreach_sub_(parameters, velocities)

    def _move_on(
        self, device: Device, group: _Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        """Step with the core's kernels. Rates stay on the device, so nothing waits."""
        code, counts = dtype_code(parameters[0]), [p.numel() for p in parameters]
        rows = [[p.data_ptr(), gradient.data_ptr()] for p, gradient in zip(parameters, gradients)]
        if group["momentum"] != 0:
            for row, parameter in zip(rows, parameters):
                row.append(self._velocity(parameter).data_ptr())
        norms = torch.empty(2, len(parameters), dtype=torch.float64, device=parameters[0].device)
        rates = torch.empty(len(parameters), dtype=torch.float64, device=parameters[0].device)
        for values, column in zip(norms, (0, 1)):
            device.norms(code, [[row[column]] for row in rows], counts, values.data_ptr())
        layerwise = group["layerwise"]
        scaled = [int(p.dim() > 1 if layerwise is None else layerwise) for p in parameters]
        decay = float(group["weight_decay"])
        trust, eps, lr = (float(group[name]) for name in ("trust_coefficient", "eps", "lr"))
        device.lars_rates(norms[0].data_ptr(), norms[1].data_ptr(), scaled, rates.data_ptr(), lr, trust, decay, eps)
        momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
        device.lars_step(code, rows, counts, rates.data_ptr(), decay, momentum, nesterov)
        note_change([*parameters, *(self._velocity(p) for p in parameters if group["momentum"] != 0)])

    def _velocity(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity: torch.Tensor = state["momentum_buffer"]
        if velocity.stride() != parameter.stride():  # loaded, or the model's memory format has changed
            velocity = state["momentum_buffer"] = torch.empty_like(parameter).copy_(velocity)
        return velocity
