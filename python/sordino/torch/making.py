"""From the arguments of `DistributedOptimizer` to what makes its steps distributed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sordino.algorithms import (
    ADPSGD,
    Algorithm,
    AllReduce,
    Layered,
    LocalSGD,
    ParameterSkipping,
    ScheduledPull,
    kind_of,
)
from sordino.context import current
from sordino.errors import UsageError
from sordino.torch.adasum import AdasumSteps
from sordino.torch.agreement import Agreement, card_of
from sordino.torch.arguments import group_indices
from sordino.torch.compression import Compression
from sordino.torch.double_buffering import BufferedSteps
from sordino.torch.elementwise import require_elementwise
from sordino.torch.finite import FiniteCheck
from sordino.torch.gossip import GossipSteps
from sordino.torch.gradients import GradientReducer
from sordino.torch.lasting import check_outlasting
from sordino.torch.layered import LayeredSteps
from sordino.torch.local_sgd import LocalSteps
from sordino.torch.operation import Adasum, Average, Product, Sum, name_of_op, require_finite
from sordino.torch.pair_averaging import PairSteps
from sordino.torch.pulling import PullSteps
from sordino.torch.segments import Settings
from sordino.torch.skipping import SkippingSteps
from sordino.torch.steps import ParameterSteps

Reducer = GradientReducer | AdasumSteps | ParameterSteps

# Options that must be the same on all ranks, beside those that are compared in words of their own.
_COMPARED = ("backward_passes_per_step", "gradient_predivide_factor", "sparse_as_dense", "check_finite")

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
    if not isinstance(options["check_finite"], bool):
        raise UsageError(f"check_finite={options['check_finite']!r}: must be True or False")
    require_finite("gradient_predivide_factor", options["gradient_predivide_factor"])
    if options["gradient_predivide_factor"] == 0:
        raise UsageError("gradient_predivide_factor=0: gradients are divided by it, so it must not be 0")
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
    adasum = options["op"] == Adasum and current().size > 1
    if current().outlasts:
        check_outlasting(options, options["op"] == Adasum)
    if adasum and options["process_set"].process_set_id != 0:
        raise UsageError("Adasum does not support process sets")
    algorithm = options["algorithm"]
    buffers = [(name, buffer) for name, buffer in options["named_buffers"] or () if buffer.is_floating_point()]
    groups = group_indices(options["groups"], parameters)
    agreement = _agreement(optimizer, parameters, names, buffers, groups, options)
    settings = Settings(
        op=options["op"],
        process_set=options["process_set"],
        segment_bytes=getattr(algorithm, "segment_bytes", AllReduce().segment_bytes),
        compression=options["compression"],
        passes=options["backward_passes_per_step"],
        predivide=options["gradient_predivide_factor"],
        sparse_as_dense=options["sparse_as_dense"],
        groups=groups,
        agreement=agreement,
        finite=_finite_check(parameters, names, agreement, options) if options["check_finite"] else None,
        members=options["members"],
    )
    if adasum:
        return AdasumSteps(current(), names, parameters, settings, compare)
    if isinstance(algorithm, AllReduce):
        if algorithm.double_buffering:
            return BufferedSteps(current(), names, parameters, [], algorithm, settings, compare)
        return GradientReducer(current(), names, parameters, settings, compare)
    if isinstance(algorithm, LocalSGD) and algorithm.sharded:
        require_elementwise(optimizer, algorithm)
    kind = _STEPS.get(kind_of(algorithm), GossipSteps)
    return kind(current(), names, parameters, buffers, algorithm, settings, compare)


def _finite_check(
    parameters: Sequence[torch.Tensor], names: Sequence[str], agreement: Agreement, options: dict[str, Any]
) -> FiniteCheck:
    """How ranks of this optimizer find out what is not finite."""
    algorithm, op, process_set = options["algorithm"], options["op"], options["process_set"]
    reduces = isinstance(algorithm, AllReduce) and op != Adasum
    same = isinstance(algorithm, Layered) or (reduces and op in (Average, Sum, Product))  # gradients, on all ranks
    asynchronous = isinstance(algorithm, (ADPSGD, ScheduledPull))
    return FiniteCheck(
        current(),
        names,
        parameters,
        process_set,
        agreement,
        alone=asynchronous or current().size == 1 or not process_set.included(),
        asks=not same,
        at_once=reduces and not algorithm.double_buffering,
    )


def _agreement(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    buffers: Sequence[tuple[str, torch.Tensor]],
    groups: tuple[tuple[int, ...], ...],
    options: dict[str, Any],
) -> Agreement:
    """What the ranks of this optimizer must have in common."""
    settings = {
        "optimizer": type(optimizer).__name__,
        "op": name_of_op(options["op"]),
        "compression": options["compression"].__name__,
        "groups": groups,
        **{name: options[name] for name in _COMPARED},
    }
    return Agreement(
        card_of(options["algorithm"], settings),
        [*names, *(f"buffer {name}" for name, _ in buffers)],
        [*parameters, *(buffer for _, buffer in buffers)],
        options["process_set"],
    )
