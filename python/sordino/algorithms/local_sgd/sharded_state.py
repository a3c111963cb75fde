"""Conversion of an optimizer's state between slices and whole parameters."""

from __future__ import annotations

from typing import Any

import torch

from sordino.algorithms.local_sgd.sharding import ShardedReducer, Slice
from sordino.runtime.collectives.objects import allgather_object


def numbered_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups in the form of a state dict, with parameters replaced by their numbers."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        count = len(group["params"])
        groups.append({**group, "params": list(range(first, first + count))})
        first += count
    return groups


def _parameters_with_slices(
    optimizer: torch.optim.Optimizer, reducer: ShardedReducer
) -> list[tuple[torch.Tensor, Slice | None]]:
    """Return the optimizer's parameters in the order of its state dict, each with the slice that this rank owns."""
    numbers = {id(parameter): i for i, parameter in enumerate(reducer.parameters)}
    owned = reducer.slices()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(parameter, owned.get(numbers[id(parameter)])) for parameter in parameters]


def gather_state(optimizer: torch.optim.Optimizer, reducer: ShardedReducer) -> dict[str, Any]:
    """Return a state dict for whole parameters, as the optimizer would have it without shards.

    Collective over the group. State tensors with one entry per element of a slice are concatenated, also within dicts,
    lists and tuples. Any other value is from the first rank that owns a slice of the parameter. Entries that belong to
    no parameter are from this rank.
    """
    with reducer.on_slices(optimizer):
        kept = optimizer.state_dict()
    whole: dict[Any, Any] = {key: value for key, value in kept["state"].items() if not isinstance(key, int)}
    parameters = _parameters_with_slices(optimizer, reducer)
    mine = [
        (index, piece.begin, piece.end, optimizer.state[piece.values])
        for index, (_, piece) in enumerate(parameters)
        if piece is not None and piece.values in optimizer.state
    ]
    gathered = allgather_object(mine, name="shards.state", process_set=reducer.settings.process_set)
    for index, begin, end, values in (entry for entries in gathered for entry in entries):
        whole[index] = _joined(whole.get(index), values, parameters[index][0], slice(begin, end))
    return {**kept, "state": whole, "param_groups": numbered_groups(optimizer)}


def _joined(whole: Any, value: Any, parameter: torch.Tensor, place: slice) -> Any:
    """Add the value of a slice to the value for the whole parameter, and return the result.

    Args:
        whole: the value from the slices before; None for the first slice.
        value: the value of the slice.
        parameter: the whole parameter.
        place: range of the slice in the parameter, in memory order.
    """
    if isinstance(value, torch.Tensor) and value.shape == (place.stop - place.start,):
        if whole is None:
            whole = torch.zeros_like(parameter, dtype=value.dtype)
        in_memory_order(whole)[place] = value
        return whole
    if type(value) is dict:
        known = whole or {}
        return known | {key: _joined(known.get(key), one, parameter, place) for key, one in value.items()}
    if type(value) in (list, tuple):
        known = whole or [None] * len(value)
        return type(value)(_joined(other, one, parameter, place) for other, one in zip(known, value, strict=True))
    return value if whole is None else whole


def scatter_state(optimizer: torch.optim.Optimizer, reducer: ShardedReducer, full: dict[str, Any]) -> None:
    """Load a state dict for whole parameters. This rank keeps the part that belongs to its slices."""
    parameters = _parameters_with_slices(optimizer, reducer)
    keys = {key for group in full["param_groups"] for key in group["params"]}
    states = {key: value for key, value in full["state"].items() if key not in keys}  # entries of no parameter
    groups, index, number = [], 0, 0
    for group in full["param_groups"]:
        mine = []
        for key in group["params"]:  # a number, or a name that torch.distributed.checkpoint has given
            parameter, piece = parameters[index]
            if piece is not None:
                if key in full["state"]:
                    states[number] = _cut(full["state"][key], parameter, piece)
                mine.append(number)
                number += 1
            index += 1
        groups.append({**group, "params": mine})
    with reducer.on_slices(optimizer):
        optimizer.load_state_dict({**full, "state": states, "param_groups": groups})


def take_over_state(optimizer: torch.optim.Optimizer, reducer: ShardedReducer) -> None:
    """Convert the state that the optimizer had before it was wrapped to state for this rank's slices.

    Empty entries are dropped. A script that reads `optimizer.state[parameter]` creates them.
    """
    owned = reducer.slices()
    for number, parameter in enumerate(reducer.parameters):
        kept, piece = optimizer.state.pop(parameter, None), owned.get(number)
        if kept and piece is not None:
            optimizer.state[piece.values] = _cut(kept, parameter, piece)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a dense tensor's elements as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _cut(value: Any, parameter: torch.Tensor, piece: Slice) -> Any:
    """Return the part of a whole parameter's value that belongs to a slice. Values of another shape stay whole."""
    if type(value) is dict:
        return {key: _cut(one, parameter, piece) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cut(one, parameter, piece) for one in value)
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    ordered = torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # `value` may have another memory order
    return in_memory_order(ordered)[piece.begin : piece.end].clone()
