"""Consensus of workers whose models differ: the mean of their parameters, and their distance from it."""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import torch

from sordino.errors import UsageError
from sordino.runtime.collectives.autograd import allreduce
from sordino.runtime.collectives.operation import Average
from sordino.runtime.collectives.ops import grouped_allreduce_
from sordino.runtime.context import current
from sordino.runtime.devices import HOST
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.runtime.tensors import squared_distance


def average_parameters(
    model: torch.nn.Module,
    buffers: Literal["local", "average"] = "average",
    process_set: ProcessSet = global_process_set,
) -> dict[str, Any]:
    """Return the mean model of all ranks, for evaluation and checkpoints. `model` is not changed. Collective.

    Args:
        model: a model with the same parameters on all ranks.
        buffers: "average" also averages floating-point buffers; "local" keeps this rank's. Integer buffers are always
            this rank's.
        process_set: the ranks to average over.

    Returns:
        A state dict of copies, for `load_state_dict` of a model like this one. Extra state of modules
        (`get_extra_state`) is this rank's.
    """
    if buffers not in ("local", "average"):
        raise UsageError(f"buffers={buffers!r}: must be 'local' or 'average'")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state: dict[str, Any] = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in model.state_dict().items()
    }
    extra = {name for name in state if name.rpartition(".")[2] == "_extra_state"}
    averaged = (name for name in state if name not in extra and (name in parameters or buffers == "average"))
    means = [real for name in averaged if (real := _real(state[name])).is_floating_point()]
    if current().size > 1 and means:
        label = current().names.plan("average_parameters", process_set.process_set_id)
        grouped_allreduce_(means, op=Average, name=label, process_set=process_set)
    return state


def consensus_distance(model: torch.nn.Module, process_set: ProcessSet = global_process_set) -> float:
    """Return D = (1/N) sum over ranks of ||w_i - mean w||_2 over all parameters, the same on all ranks. Collective.

    Source: hierarchical local SGD, equation 9; "consensus distance" in the literature of gossip.
    """
    mean = average_parameters(model, "local", process_set)
    pairs = ((_real(parameter.detach()), _real(mean[name])) for name, parameter in model.named_parameters())
    squares = sum(squared_distance(mine, other) for mine, other in pairs if mine.is_floating_point())
    mine = torch.tensor([math.sqrt(squares)], dtype=torch.float64, device=HOST)
    label = current().names.plan("consensus_distance", process_set.process_set_id)
    return allreduce(mine, op=Average, name=label, process_set=process_set).item()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of real numbers, in the same memory; any other tensor as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
