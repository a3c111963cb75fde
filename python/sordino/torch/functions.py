"""Broadcasts of parameters, optimizer state and objects, so that all ranks start equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from sordino.errors import UsageError
from sordino.runtime.collectives.objects import Root, allgather_object, broadcast_object
from sordino.runtime.collectives.operation import synchronize_all
from sordino.runtime.collectives.ops import broadcast_async_
from sordino.runtime.context import current
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.runtime.recovery.losses import together
from sordino.runtime.tensors import check, match_memory_formats

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Copy tensors from `root_rank` into those of all other ranks, in place.

    Args:
        params: a `state_dict()`, or an iterable (also a generator) of tensors or of (name, tensor) pairs. Entries that
            are not tensors (None, extra state) are ignored.
        root_rank: world rank whose values all ranks get.
        process_set: the ranks that take part, including `root_rank`.

    Raises:
        UsageError: `params` has another type, a name twice, or a tensor that cannot be sent. Then no tensor has been
            sent.
        OperationMismatch: a tensor's shape or dtype differs between ranks.
    """
    if isinstance(params, Mapping):
        entries = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        entries = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        name = type(params).__name__
        raise UsageError(f"invalid params of type: {name}; expected a state_dict, tensors or named tensors")
    for name, tensor in entries:
        if name is None and not isinstance(tensor, torch.Tensor):
            name = type(tensor).__name__
            raise UsageError(f"invalid params: an entry is a {name}, not a tensor or a (name, tensor) pair")
    root, context = Root(root_rank), current()
    named = [(name, tensor) for name, tensor in entries if isinstance(tensor, torch.Tensor)]
    seen: set[str] = set()
    for name, tensor in named:
        if name is not None and name in seen:
            raise UsageError(f"broadcast_parameters: two tensors have the name '{name}': give each its own name")
        seen.add(name)
        try:
            check(tensor)
        except UsageError as error:
            raise UsageError(f"broadcast_parameters: {name or 'a tensor without a name'}: {error}") from error

    def work() -> list[torch.Tensor]:
        tensors = [tensor for _, tensor in named]
        if context.survives_losses:  # data that an ended world has begun to send may still arrive
            tensors = [tensor.detach().clone() for tensor in tensors]
        handles = [
            broadcast_async_(
                tensor, root.rank, name=None if name is None else f"parameters.{name}", process_set=process_set
            )
            for tensor, (name, _) in zip(tensors, named)
        ]
        synchronize_all(handles)
        return tensors

    with torch.no_grad():
        for result, (_, tensor) in zip(together(context, process_set, work), named):
            if result is not tensor:
                tensor.copy_(result)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy an optimizer's state and hyper-parameters from `root_rank` to all other ranks.

    Ranks whose optimizer has no state yet get it from the root, without a step on any rank. As in Horovod, parameters
    without a gradient get a zero gradient if their optimizer has no state.

    Args:
        optimizer: plain or wrapped, with the same parameters in the same groups on all ranks.
        root_rank: world rank whose state all ranks get.
        model: the model; if given, its embeddings with sparse gradients get a sparse zero gradient.
        process_set: the ranks that take part, including `root_rank`.
    """
    if isinstance(getattr(optimizer, "_inner", optimizer), torch.optim.LBFGS):
        raise UsageError("cannot broadcast torch.optim.LBFGS state")
    root = Root(root_rank)
    together(current(), process_set, lambda: _broadcast_optimizer_state(optimizer, root, model, process_set))


def _broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root: Root, model: torch.nn.Module | None, process_set: ProcessSet
) -> None:
    tensors: list[torch.Tensor] = []

    def pack(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return _TensorPlace(tuple(value.shape), value.dtype, value.device.type)
        return tuple(map(pack, value)) if type(value) is tuple else value

    if not optimizer.state:
        _zero_missing_gradients(optimizer, model)
    state = optimizer.state_dict()
    skeleton = None
    if root.here:
        skeleton = _mapped(state, pack)
    skeleton = broadcast_object(skeleton, root.rank, name="optimizer_state", process_set=process_set)
    if not root.here:

        def unpack(value: Any) -> Any:
            if isinstance(value, _TensorPlace):
                tensors.append(torch.empty(value.shape, dtype=value.dtype, device=value.device_type))
                return tensors[-1]
            return tuple(map(unpack, value)) if type(value) is tuple else value

        skeleton = _mapped(skeleton, unpack)
    named = [(f"optimizer_state.{index}", tensor) for index, tensor in enumerate(tensors)]
    broadcast_parameters(named, root.rank, process_set)
    if not root.here:
        optimizer.load_state_dict(skeleton)
        match_memory_formats(optimizer)


def _mapped(state: Mapping[Any, Any], change: Callable[[Any], Any]) -> dict[Any, Any]:
    """Return the state dict of an optimizer with `change` applied to each value of its state and its groups.

    An entry of a parameter is a dict of values. An entry that belongs to no parameter may be a value itself. A
    hyper-parameter may be a tensor, or a tuple of tensors.
    """

    def changed(entry: Any) -> Any:
        return {name: change(value) for name, value in entry.items()} if isinstance(entry, dict) else change(entry)

    entries = {key: changed(entry) for key, entry in state["state"].items()}
    return {**state, "state": entries, "param_groups": list(map(changed, state["param_groups"]))}


def _zero_missing_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = () if model is None else model.modules()
    sparse = {module.weight for module in modules if isinstance(module, embeddings) and module.sparse}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                zero = torch.zeros_like(parameter)
                parameter.grad = zero.to_sparse(1) if parameter in sparse else zero


class _TensorPlace:
    """Placeholder for a tensor in a pickled skeleton. The tensor itself travels by broadcast."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device_type: str) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device_type = device_type  # not the device, because ranks may number theirs differently
