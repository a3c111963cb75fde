"""From the arguments of `DistributedOptimizer` to what makes its steps distributed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sordino.algorithms import ADPSGD, Algorithm, AllReduce, Layered, LocalSGD, ParameterSkipping, ScheduledPull
from sordino.context import current
from sordino.errors import UsageError
from sordino.torch.adasum import AdasumSteps
from sordino.torch.arguments import group_indices
from sordino.torch.compression import Compression
from sordino.torch.double_buffering import BufferedSteps
from sordino.torch.gossip import GossipSteps
from sordino.torch.gradients import GradientReducer
from sordino.torch.lasting import check_outlasting, fitted
from sordino.torch.layered import LayeredSteps
from sordino.torch.local_sgd import LocalSteps, require_elementwise
from sordino.torch.operation import Adasum, Average
from sordino.torch.pair_averaging import PairSteps
from sordino.torch.pulling import PullSteps
from sordino.torch.segments import Settings
from sordino.torch.skipping import SkippingSteps
from sordino.torch.steps import ParameterSteps

Reducer = GradientReducer | AdasumSteps | ParameterSteps

_STEPS: dict[type[Algorithm], type[ParameterSteps]] = {
    ADPSGD: PairSteps,
    Layered: LayeredSteps,
    LocalSGD: LocalSteps,
    ParameterSkipping: SkippingSteps,
    ScheduledPull: PullSteps,
}


def check_options(options: dict[str, Any]) -> None:
    """UsageError for options that mean nothing to the algorithm."""
    algorithm, name = options["algorithm"], type(options["algorithm"]).__name__
    averages = getattr(algorithm, "buffers", "local") == "average"
    if averages and options["named_buffers"] is None:
        raise UsageError(f'{name}(buffers="average") needs named_buffers=model.named_buffers()')
    if not averages and options["named_buffers"] is not None:
        raise UsageError(f'named_buffers has no effect with {algorithm}; some others take buffers="average"')
    if isinstance(algorithm, AllReduce):
        if algorithm.double_buffering and options["op"] == Adasum:
            raise UsageError("double_buffering is for gradients, and op=Adasum sends what the step has changed")
        return
    if options["op"] != Average:
        raise UsageError(f"{name} averages; op= is for AllReduce")
    if isinstance(algorithm, Layered):
        if options["gradient_predivide_factor"] != 1.0:
            raise UsageError("gradient_predivide_factor is for AllReduce; Layered averages group by group")
        return
    if algorithm.workers_in_group == 1:
        if options["compression"] is not Compression.none:
            raise UsageError(f"compression= is for gradients, and {name} without groups sends none")
        if options["groups"] is not None or options["gradient_predivide_factor"] != 1.0:
            raise UsageError(f"groups and gradient_predivide_factor are for gradients, and {name} sends none")


def make_reducer(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    options: dict[str, Any],
    compare: bool,
) -> Reducer:
    """What makes a step of `optimizer` a distributed one.

    Args:
        parameters: that it steps.
        options: the other arguments of `DistributedOptimizer`.
        compare: whether to meet the other ranks now (collective), or at the first step.
    """
    if current().outlasts:
        check_outlasting(options, options["op"] == Adasum)
    if options["op"] == Adasum and current().size > 1:
        if options["process_set"].process_set_id != 0:
            raise UsageError("Adasum does not support process sets")
        return AdasumSteps(current(), names, parameters, options["compression"], compare)
    algorithm = fitted(current(), options["algorithm"], options["process_set"])
    settings = Settings(
        op=options["op"],
        process_set=options["process_set"],
        segment_bytes=getattr(algorithm, "segment_bytes", AllReduce().segment_bytes),
        compression=options["compression"],
        passes=options["backward_passes_per_step"],
        predivide=options["gradient_predivide_factor"],
        sparse_as_dense=options["sparse_as_dense"],
        groups=group_indices(options["groups"], parameters),
    )
    if isinstance(algorithm, AllReduce):
        if algorithm.double_buffering:
            return BufferedSteps(current(), names, parameters, [], algorithm, settings, compare)
        return GradientReducer(current(), names, parameters, settings, compare)
    buffers = [(name, buffer) for name, buffer in options["named_buffers"] or () if buffer.is_floating_point()]
    if isinstance(algorithm, LocalSGD) and algorithm.sharded:
        require_elementwise(optimizer)
    kind = _STEPS.get(type(algorithm), GossipSteps)
    return kind(current(), names, parameters, buffers, algorithm, settings, compare)
