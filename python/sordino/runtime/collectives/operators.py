"""Definition of torch operators that compilers do not reorder.

An operator is registered as an ordered effect. torch keeps the order of effects in its graphs, but Inductor, its
default compiler, loses it in torch 2.13: it stores the order under the names of buffers, and looks it up under the
names of operations. Then it reorders operators to save memory, in different ways on ranks with different shapes. So
each operator has a lowering that stores the order correctly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("sordino", "FRAGMENT")
_operators: list[Any] = []


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator in the namespace "sordino", and return it.

    Args:
        schema: its name, arguments and result. There must be one result, which may be a list, because torch 2.13
            expects that of effects.
        run: executes it, on any device.
        fake: returns results that have only shapes and dtypes.
    """
    name = schema.partition("(")[0]

    def describe(*arguments: Any) -> Any:
        _keep_order_in_inductor()
        return fake(*arguments)

    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sordino::{name}", describe, lib=_library)
    operator = getattr(torch.ops.sordino, name).default
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(operator, _EffectType.ORDERED)
    _operators.append(operator)
    return operator


def differentiate(operator: Any, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
    """Make an operator differentiable, with the functions that `torch.library.register_autograd` takes."""
    torch.library.register_autograd(operator._name.partition(".")[0], backward, setup_context=setup, lib=_library)


def _keep_order_in_inductor() -> None:
    """Give Inductor, if it is loaded, lowerings of all operators. Called by fakes, which run before lowerings."""
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    for operator in _operators if lowering is not None else ():
        if operator not in lowering.lowerings:
            lowering.lowerings[operator] = _in_order(lowering.fallback_handler(operator))


def _in_order(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Return a lowering like `lower`, whose kernels run after the previous kernel with an effect."""
    from torch._higher_order_ops.effects import _EffectType
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.virtualized import V

    def lower_in_order(*arguments: Any, **named: Any) -> Any:
        graph, previous = V.graph, V.graph.effectful_ops.get(_EffectType.ORDERED)
        count = len(graph.operations)
        result = lower(*arguments, **named)
        for operation in graph.operations[count:]:
            if previous is not None and isinstance(operation, FallbackKernel):
                graph.additional_star_deps[operation.get_operation_name()].add(previous.get_name())
        return result

    return lower_in_order
