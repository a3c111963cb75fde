"""Batch normalization with the statistics of all ranks' batches."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from sordino.runtime.collectives.operation import Sum
from sordino.runtime.collectives.ops import allreduce_
from sordino.runtime.context import current
from sordino.runtime.process_set import ProcessSet, global_process_set


class SyncBatchNorm(_BatchNorm):
    """Drop-in replacement for `torch.nn.BatchNorm1d/2d/3d` with mean and variance over the batches of all ranks.

    Ranks may have batches of different sizes. In eval mode, or with one rank, it is the ordinary layer. As in Horovod,
    with `track_running_stats=False` the batches of all ranks count in eval mode, too. Gradients of weight and bias
    stay local: `DistributedOptimizer` reduces them like all others.

    Args:
        process_set: the ranks whose batches count. All of them call the layer. The other arguments are those of
            `torch.nn.BatchNorm2d`.
    """

    process_set = global_process_set  # for layers that an earlier version has pickled

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        process_set: ProcessSet = global_process_set,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if not bias:  # older versions of PyTorch have no such argument
            self.register_parameter("bias", None)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace all batch normalization in a module, including torch's own SyncBatchNorm. Return the module.

        As in `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, parameters and buffers stay the same objects. If the
        module itself is such a layer, it is not changed, and another one is returned. A layer that occurs several times
        is one layer afterwards, too.

        Args:
            module: a model, or one layer.
            process_set: the ranks whose batches count.
        """
        return cls._converted(module, process_set, {})

    @classmethod
    def _converted(
        cls, module: torch.nn.Module, process_set: ProcessSet, known: dict[torch.nn.Module, torch.nn.Module]
    ) -> torch.nn.Module:
        """Return the replacement of a module; `known` has those of all modules that were visited."""
        if module in known:
            return known[module]
        if isinstance(module, _BatchNorm) and not isinstance(module, (cls, _LazyNormBase)):
            layer = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                device="meta",
                process_set=process_set,
            )
            for name in ("weight", "bias"):
                layer.register_parameter(name, getattr(module, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                layer.register_buffer(name, getattr(module, name))
            layer.training = module.training
            known[module] = layer
            return layer
        known[module] = module
        for name, child in list(module._modules.items()):  # named_children() leaves out the second name of a layer
            if child is not None:
                setattr(module, name, cls._converted(child, process_set, known))
        return module

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch. Input and output have the shape (batch, num_features, ...)."""
        self._check_input_dim(input)
        batch_statistics = self.training or not self.track_running_stats
        if not batch_statistics or len(self.process_set.ranks or []) == 1:
            return super().forward(input)
        recorder = current().recorder
        if recorder is not None and self.training and torch.is_grad_enabled():
            recorder.begins()  # this is the forward pass of a step, not besides the steps
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.process_set)
        if self.training and self.track_running_stats and count > 0:
            assert self.running_mean is not None and self.running_var is not None
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return output  # type: ignore[no-any-return]


def warn_of_local_statistics(named: object) -> None:
    """Warn if the model of these `named_parameters()` has torch's own SyncBatchNorm.

    It needs torch.distributed. If that is not initialized, it is silently an ordinary layer.
    """
    if current().size == 1 or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    model = inspect.getgeneratorlocals(named).get("self") if inspect.isgenerator(named) else None
    for name, layer in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            warnings.warn(
                f"'{name}' is a torch.nn.SyncBatchNorm, which needs torch.distributed: without it, its statistics are "
                "those of this rank's batches only. Call sordino.torch.SyncBatchNorm.convert_sync_batchnorm(model) "
                "before you create the optimizer",
                stacklevel=4,
            )
            return


class _Normalize(torch.autograd.Function):
    """Normalization by sums over all ranks, in forward (count, x, x²) and backward (dy, dy·x̂), at least in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> Any:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        axes = [0, *range(2, x.dim())]
        channels = x.shape[1]
        local_count = wide.numel() // max(channels, 1)
        # Two rounds, mean first: E[x²] - E[x]² would cancel for data far from zero.
        sums = torch.cat([wide.sum(axes), wide.new_tensor([float(local_count)])])
        allreduce_(sums, op=Sum, process_set=process_set)
        if sums[-1] == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got one on all ranks, {x.shape}")
        total = sums[-1].clone()
        count = total.clamp(min=1)
        mean = sums[:-1] / count
        shape = [1, channels] + [1] * (x.dim() - 2)
        centred = wide - mean.view(shape)
        squares = (centred * centred).sum(axes)
        allreduce_(squares, op=Sum, process_set=process_set)
        variance = squares / count
        inverse = torch.rsqrt(variance + eps)
        normal = centred * inverse.view(shape)
        ctx.save_for_backward(normal, weight, inverse, count)
        ctx.axes, ctx.shape, ctx.dtype, ctx.process_set = axes, shape, x.dtype, process_set
        ctx.bias_dtype = None if bias is None else bias.dtype
        result = normal.clone()  # a copy, because an in-place activation may follow
        if weight is not None:
            result = normal * weight.to(wide.dtype).view(shape)
        if bias is not None:
            result = result + bias.to(wide.dtype).view(shape)
        ctx.mark_non_differentiable(mean, variance, total)
        return result.to(x.dtype), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> Any:
        normal, weight, inverse, count = ctx.saved_tensors
        wide = grad.to(normal.dtype)
        sum_dy = wide.sum(ctx.axes)
        sum_dy_normal = (wide * normal).sum(ctx.axes)
        totals = torch.stack([sum_dy, sum_dy_normal])
        allreduce_(totals, op=Sum, process_set=ctx.process_set)
        mean_dy, mean_dy_normal = (total.view(ctx.shape) for total in totals / count)
        scale = inverse if weight is None else inverse * weight.to(normal.dtype)
        grad_x = (wide - mean_dy - normal * mean_dy_normal) * scale.view(ctx.shape)
        grad_weight = None if weight is None else sum_dy_normal.to(weight.dtype)
        grad_bias = None if ctx.bias_dtype is None else sum_dy.to(ctx.bias_dtype)
        return grad_x.to(ctx.dtype), grad_weight, grad_bias, None, None
