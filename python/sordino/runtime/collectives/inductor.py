"""Order of collectives in the code of Inductor, the default compiler of torch.compile.

torch keeps operators with effects in order in its graphs, but Inductor of torch 2.13 loses the order: it notes it by the
names of buffers, and looks it up by the names of operations. Then it reorders collectives to save memory, in another
way on ranks with other shapes. So each operator has a lowering that notes the order in the right way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any


def keep_order(operators: Iterable[Any]) -> None:
    """Let Inductor keep these operators in order, if it is loaded."""
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None:
        return
    for operator in operators:
        if operator not in lowering.lowerings:
            lowering.lowerings[operator] = _in_order(lowering.fallback_handler(operator))


def _in_order(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Return a lowering like `lower`, whose kernels run after the previous one with an effect."""
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
