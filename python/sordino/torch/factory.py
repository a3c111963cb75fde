"""Construction of the strategy from the arguments of `DistributedOptimizer`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sordino.algorithms.strategy import Runtime, Strategy
from sordino.errors import UsageError
from sordino.runtime.collectives.operation import Product, Sum, name_of_op
from sordino.runtime.context import current
from sordino.runtime.gradients.nonfinite import FiniteCheck
from sordino.runtime.gradients.options import Options
from sordino.runtime.gradients.settings import Settings
from sordino.runtime.gradients.settings_check import SettingsCheck, fingerprint_of
from sordino.runtime.tensors import address_of
from sordino.torch.arguments import group_indices
from sordino.torch.mesh import local_shards
from sordino.torch.start import INSTEAD

# Options that must be the same on all ranks, in addition to those that `_check` lists.
_COMPARED = ("backward_passes_per_step", "gradient_predivide_factor", "sparse_as_dense", "check_finite")


def make_strategy(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    options: Options,
    compare: bool,
) -> Strategy:
    """Return the strategy for the steps of `optimizer`.

    Args:
        optimizer: the wrapped optimizer.
        parameters: parameters that it steps.
        names: names of the parameters.
        options: the other arguments of `DistributedOptimizer`.
        compare: whether to meet the other ranks now (collective), or at the first step.
    """
    context, algorithm = current(), options.algorithm
    groups = group_indices(options.groups, parameters)
    parameters = local_shards(parameters, names, options)
    _check_memory(parameters, names)
    if context.survives_losses:
        _check_surviving(options)
    buffers = [(name, buffer) for name, buffer in options.named_buffers or () if buffer.is_floating_point()]
    check = _check(optimizer, parameters, names, buffers, groups, options)
    settings = Settings(
        op=options.op,
        process_set=options.process_set,
        bucket_bytes=algorithm.traits.bucket_bytes,
        compression=options.compression,
        codec=options.codec,
        passes=options.backward_passes_per_step,
        predivide=options.gradient_predivide_factor,
        sparse_as_dense=options.sparse_as_dense,
        groups=groups,
        check=check,
        finite=_finite_check(parameters, names, check, options) if options.check_finite else None,
        members=options.members,
        evaluates_once=_evaluates_once(optimizer),
    )
    strategy: Strategy = algorithm.strategy(Runtime(context, optimizer, names, parameters, buffers, settings, compare))
    return strategy


def _evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer certainly evaluates a closure once per step, as torch's own do, except LBFGS."""
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and not isinstance(optimizer, torch.optim.LBFGS)


def _check_memory(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise UsageError for a parameter without memory, such as a meta tensor."""
    for name, parameter in zip(names, parameters):
        try:
            address_of(parameter)
        except UsageError as error:
            raise UsageError(f"parameter '{name}' cannot be trained with DistributedOptimizer: {error}") from error


def _check_surviving(options: Options) -> None:
    """Raise UsageError for options with which the remaining ranks cannot continue after a loss."""
    problem = "op=Adasum" if options.adasum else options.algorithm.traits.ends_with
    if problem is not None:
        raise UsageError(f"{problem} cannot continue without lost ranks: {INSTEAD}")


def _finite_check(
    parameters: Sequence[torch.Tensor], names: Sequence[str], check: SettingsCheck, options: Options
) -> FiniteCheck:
    """Return the check for gradients that are not finite."""
    context, traits, process_set = current(), options.algorithm.traits, options.process_set
    folds = options.averages or options.op in (Sum, Product)  # an infinite or NaN input makes the result not finite
    same = traits.same_gradients and folds
    return FiniteCheck(
        context,
        names,
        parameters,
        process_set,
        check,
        alone=not traits.synchronous or context.size == 1 or not process_set.included(),
        asks=not same,
        at_once=traits.takes_op and not options.adasum and not traits.late,
    )


def _check(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    buffers: Sequence[tuple[str, torch.Tensor]],
    groups: tuple[tuple[int, ...], ...],
    options: Options,
) -> SettingsCheck:
    """Return the check of the properties that all ranks of this optimizer must have in common."""
    settings = {
        "optimizer": type(optimizer).__name__,
        "op": name_of_op(options.op),
        "compression": options.compression.__name__ if options.codec is None else repr(options.codec),
        "groups": groups,
        **{name: getattr(options, name) for name in _COMPARED},
    }
    return SettingsCheck(
        fingerprint_of(options.algorithm, settings),
        [*names, *(f"buffer {name}" for name, _ in buffers)],
        [*parameters, *(buffer for _, buffer in buffers)],
        options.process_set,
        0 if options.algorithm.traits.same_gradients else len(parameters),
    )
