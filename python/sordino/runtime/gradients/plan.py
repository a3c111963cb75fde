"""Plan of a reducer: the order of the gradients, which of them are sparse, and which form a bucket together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sordino._core import Layout
from sordino.runtime.collectives.autograd import allgather
from sordino.runtime.devices import HOST
from sordino.runtime.gradients.places import WHOLE, spec_of
from sordino.runtime.gradients.settings import Settings
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import dtype_code, label


def whole_layout(names: Sequence[str], parameters: Sequence[torch.Tensor]) -> Layout:
    """Return all parameters as one layout, for its hash."""
    return Layout([(label(name, p), dtype_code(p, name), tuple(p.shape)) for name, p in zip(names, parameters)], WHOLE)


def agree_on_order(
    name: str, indices: Sequence[int], produced: Sequence[int], parameters: Sequence[torch.Tensor], ranks: ProcessSet
) -> tuple[list[int], list[int]]:
    """Agree on the order of some gradients, and on which of them are sparse. Collective.

    Args:
        name: name of the plan.
        indices: indices of their parameters, the same on all ranks.
        produced: indices of parameters in the order in which backward has produced their gradients on this rank.
        parameters: all parameters.
        ranks: the ranks that reduce the gradients.

    Returns:
        `indices` in the order of the first rank, and the indices of gradients that are sparse on some rank.
    """
    sorted_indices = sorted(indices)
    wanted = set(indices)
    order = [i for i in produced if i in wanted]
    order += sorted(wanted - set(order), reverse=True)
    sparse = [int(grad is not None and grad.is_sparse) for grad in (parameters[i].grad for i in sorted_indices)]
    mine = torch.tensor([order, sparse], device=HOST).unsqueeze(0)
    table = allgather(mine, name=f"{name}.plan", process_set=ranks)
    on_some_rank = table[:, 1].any(dim=0).tolist()
    return table[0, 0].tolist(), [i for i, is_sparse in zip(sorted_indices, on_some_rank) if is_sparse]


def divide(
    order: Sequence[int], names: Sequence[str], parameters: Sequence[torch.Tensor], settings: Settings
) -> list[list[int]]:
    """Divide dense gradients into buckets: the user's groups, then the other gradients in order, by size.

    A bucket has gradients of one device and dtype, so a group may be several buckets.

    Args:
        order: indices of their parameters in the order of the plan.
        names: names of all parameters.
        parameters: all parameters.
        settings: settings of the reduction.

    Returns:
        the indices of the members of each bucket. An empty list is not a bucket, but counts in the names of buckets.
    """

    def kind(index: int) -> tuple[torch.device, torch.dtype]:
        return parameters[index].device, parameters[index].dtype

    parts = [
        [i for i in group if i in order and kind(i) == one]
        for group in settings.groups
        for one in dict.fromkeys(map(kind, group))
    ]
    grouped = {i for part in parts for i in part}
    for device in dict.fromkeys(parameter.device for parameter in parameters):
        rest = [i for i in order if i not in grouped and parameters[i].device == device]
        layout = Layout([spec_of(names[i], parameters[i]) for i in rest], settings.bucket_bytes)
        parts += [rest[run.first : run.last] for run in layout.segments]
    return parts
