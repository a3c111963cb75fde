"""Making ranks start equal: broadcasts of parameters, optimizer state and objects."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from sordino.context import current
from sordino.errors import UsageError
from sordino.torch.autograd import allgather
from sordino.torch.operation import synchronize
from sordino.torch.ops import broadcast_, broadcast_async_
from sordino.torch.process_sets import ProcessSet, global_process_set
from sordino.torch.surviving import together

try:
    import cloudpickle as _pickler
except ImportError:  # plain pickle serves everything but lambdas and local classes
    _pickler = pickle


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Copies tensors from `root_rank` into those of all other ranks, in place.

    Args:
        params: a `state_dict()`, or an iterable of tensors or of (name, tensor) pairs (a generator will do).
            Entries that are not tensors (None, extra state) are left alone.
        root_rank: the rank whose values everybody gets.

    Raises:
        UsageError: `params` is none of these.
        OperationMismatch: a tensor's shape or dtype differs between ranks.
    """
    if isinstance(params, Mapping):
        entries = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        entries = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        kind = type(params).__name__
        raise UsageError(f"invalid params of type: {kind}; expected a state_dict, tensors or named tensors")
    for name, tensor in entries:
        if name is None and not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise UsageError(f"invalid params: an entry is a {kind}, not a tensor or a (name, tensor) pair")
    root, context = _Root(root_rank), current()
    named = [(name, tensor) for name, tensor in entries if isinstance(tensor, torch.Tensor)]

    def work() -> list[torch.Tensor]:
        tensors = [tensor for _, tensor in named]
        if context.outlasts:  # what a world that has ended has begun to send may still arrive
            tensors = [tensor.detach().clone() for tensor in tensors]
        handles = [
            broadcast_async_(tensor, root.rank, name=None if name is None else f"parameters.{name}")
            for tensor, (name, _) in zip(tensors, named)
        ]
        for handle in handles:
            synchronize(handle)
        return tensors

    with torch.no_grad():
        for result, (_, tensor) in zip(together(context, global_process_set, work), named):
            if result is not tensor:
                tensor.copy_(result)


class _Root:
    """The rank that sends, which has another number when others have been lost."""

    def __init__(self, rank: int) -> None:
        self._context = current()
        identities = self._context.world.identities
        if not 0 <= rank < len(identities):
            raise UsageError(f"root_rank={rank}: the ranks are 0 to {len(identities) - 1}")
        self._identity = identities[rank]

    @property
    def rank(self) -> int:
        """Its number."""
        return self._context.rank_of(self._identity, "the rank that was to send")

    @property
    def here(self) -> bool:
        """Whether it is this one."""
        return self._context.identity == self._identity


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copies an optimizer's state and hyper-parameters from `root_rank` to all other ranks.

    Ranks whose optimizer has no state yet get it from the root, without a step being taken anywhere. As in Horovod,
    parameters of an optimizer without state that have no gradient have a zero one afterwards.

    Args:
        optimizer: plain or wrapped; the same parameters in the same groups on all ranks.
        root_rank: the rank whose state everybody gets.
        model: where given, embeddings with sparse gradients get a sparse zero.
    """
    if isinstance(getattr(optimizer, "_inner", optimizer), torch.optim.LBFGS):
        raise UsageError("cannot broadcast torch.optim.LBFGS state")
    root = _Root(root_rank)
    together(current(), global_process_set, lambda: _broadcast_optimizer_state(optimizer, root, model))


def _broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: _Root, model: torch.nn.Module | None) -> None:
    tensors: list[torch.Tensor] = []

    def pack(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return _TensorPlace(tuple(value.shape), value.dtype, value.device.type)
        return value

    if not optimizer.state:
        _zero_missing_gradients(optimizer, model)
    state = optimizer.state_dict()
    skeleton = None
    if root.here:
        entries = {key: {name: pack(value) for name, value in entry.items()} for key, entry in state["state"].items()}
        skeleton = {**state, "state": entries}
    skeleton = broadcast_object(skeleton, root.rank, name="optimizer_state")
    if not root.here:

        def unpack(value: Any) -> Any:
            if isinstance(value, _TensorPlace):
                tensors.append(torch.empty(value.shape, dtype=value.dtype, device=value.kind))
                return tensors[-1]
            return value

        skeleton["state"] = {
            key: {name: unpack(value) for name, value in entry.items()} for key, entry in skeleton["state"].items()
        }
    broadcast_parameters([(f"optimizer_state.{index}", tensor) for index, tensor in enumerate(tensors)], root.rank)
    if not root.here:
        optimizer.load_state_dict(skeleton)


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
    """Stands for a tensor in a pickled skeleton; the tensor itself travels by broadcast."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
        self.shape = shape
        self.dtype = dtype
        self.kind = kind  # of device; ranks may number theirs differently


def _to_bytes(obj: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    _pickler.dump(obj, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends a Python object from `root_rank`, pickled, and returns it on every rank (on the root: `obj` itself).

    It is unpickled on the other ranks, so it may run code there: only ranks of one job talk to each other.

    Args:
        obj: what to send; ignored on other ranks, which may pass None.
        root_rank: the world rank that sends.
        name: needed only where ranks call several of these in different orders.
        process_set: the ranks that take part.
    """
    context, root = current(), _Root(root_rank)
    label = name if name is not None else context.plan_name("broadcast_object", process_set.process_set_id)

    def work() -> Any:
        payload = _to_bytes(obj) if root.here else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([payload.numel()], dtype=torch.int64)
        broadcast_(length, root.rank, name=f"{label}.length", process_set=process_set)
        if not root.here:
            payload = torch.empty(int(length), dtype=torch.uint8)
        broadcast_(payload, root.rank, name=f"{label}.data", process_set=process_set)
        return obj if root.here else _from_bytes(payload)

    return together(context, process_set, work)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, pickled on the way, in rank order. See `broadcast_object` about trust.

    Args:
        obj: this rank's object.
        name: needed only where ranks call several of these in different orders.
        process_set: the ranks that take part.
    """
    label = name if name is not None else current().plan_name("allgather_object", process_set.process_set_id)
    payload = _to_bytes(obj)

    def work() -> list[Any]:
        lengths = allgather(torch.tensor([payload.numel()]), name=f"{label}.length", process_set=process_set)
        everything = allgather(payload, name=f"{label}.data", process_set=process_set)
        return [_from_bytes(part) for part in torch.split(everything, lengths.tolist())]

    return together(current(), process_set, work)
