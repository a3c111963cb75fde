"""Local shards: tensors that stand for parameters that are DTensors (FSDP2, tensor parallelism).

A local shard has the values of a DTensor on this rank, and its `.grad` is the part of the DTensor's gradient on this
rank. Strategies and reducers get local shards instead of the parameters, so they need not know DTensors. The optimizer
keeps the DTensors.

FSDP2 keeps references to the memory of its parameters. So this memory never moves: exchanges of parameters copy the
values to a flat buffer and back (`ParameterBuffer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor. Does not import DTensor, which takes long."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


class LocalShard(torch.Tensor):
    """Part of a DTensor on this rank. Made by `local_shard`.

    Functions of torch that take a local shard return ordinary tensors.

    Attributes:
        whole: the DTensor, a parameter.
    """

    whole: Any

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def local(self) -> torch.Tensor:
        """Current values on this rank, in the memory of the DTensor. This memory may be replaced between steps."""
        with torch.no_grad():
            values: torch.Tensor = self.whole.to_local()
            return values.detach()

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """Part of the DTensor's gradient on this rank, in the memory of the gradient; None without a gradient."""
        gradient = self.whole.grad
        if gradient is None:
            return None
        with torch.no_grad():
            local = gradient.to_local()
        # torch may still communicate it (AsyncCollectiveTensor).
        return local.wait() if hasattr(local, "trigger_wait") else local  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self.whole.grad = None
            return
        from torch.distributed.tensor import DTensor

        like = self.whole if self.whole.grad is None else self.whole.grad
        layout = (like.device_mesh, like.placements)
        self.whole.grad = DTensor.from_local(value, *layout, run_check=False, shape=like.shape, stride=like.stride())

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the DTensor is trained."""
        return bool(self.whole.requires_grad)


def local_shard(parameter: Any) -> LocalShard:
    """Return the local shard of a parameter that is a DTensor."""
    with torch.no_grad():
        shard: LocalShard = torch.Tensor._make_subclass(LocalShard, parameter.to_local().detach())
    shard.whole = parameter
    return shard


class ShardHooks:
    """Hook of one DTensor that counts its gradient.

    FSDP2 sets gradients itself. It calls post-accumulate-grad hooks, but no AccumulateGrad node runs. A hook that the
    user registers later runs too late to change the gradient that is reduced.

    Args:
        shard: the local shard of the DTensor.
        noted: called with the shard when a gradient has been added.
        counted: called after `noted`.
    """

    def __init__(self, shard: LocalShard, noted: Callable[..., None], counted: Callable[..., None]) -> None:
        def hook(_: Any) -> None:
            # FSDP2 sets the last gradients in a callback at the end of backward. torch computes gradients there, too.
            in_node = torch._C._current_autograd_node() is not None
            with torch.set_grad_enabled(in_node and torch.is_grad_enabled()):
                noted(shard)
                counted()

        self._hook = shard.whole.register_post_accumulate_grad_hook(hook)

    def follow(self, _: torch.Tensor) -> None:
        """Do nothing: the hook belongs to the tensor, which has no node to follow."""

    def remove(self) -> None:
        """Remove the hook."""
        self._hook.remove()


def clip_grad_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale gradients as `torch.nn.utils.clip_grad_norm_` does, by the norm of whole gradients.

    Collective over the ranks of the device mesh if a parameter is a local shard.

    Args:
        parameters: parameters, or local shards of them.
        max_norm: largest norm of all gradients together.
        norm_type: order of the norm; may be `inf`.
        error_if_nonfinite: whether to raise RuntimeError if the norm is NaN or infinite.

    Returns:
        the norm before scaling, an ordinary tensor without dimensions.
    """
    wholes = [one.whole if isinstance(one, LocalShard) else one for one in parameters]
    norm: Any = torch.nn.utils.clip_grad_norm_(wholes, max_norm, norm_type, error_if_nonfinite)
    return norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[no-any-return]
