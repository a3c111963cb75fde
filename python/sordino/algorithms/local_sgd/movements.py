"""Models after the last averaging, from which aggregate="gradients" counts the changes of each group.

Groups that continue from a checkpoint within an interval have different models. Their changes count from the models
that they had in common, which are therefore in the state: by the names of parameters, each whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sordino.algorithms.diloco.fragment import Elements
from sordino.algorithms.local_sgd.averaging import Averaging, Pieces, Values, drop_residuals
from sordino.algorithms.local_sgd.sharded_state import in_memory_order
from sordino.runtime.collectives.objects import allgather_object
from sordino.runtime.collectives.operation import Sum
from sordino.runtime.local_shards import LocalShard
from sordino.runtime.parameter_names import finder
from sordino.runtime.process_set import ProcessSet

Part = tuple[str, int, int, torch.Tensor]
"""Name of a parameter, range of its elements in memory order, and values of these elements, 1-d."""

Find = Callable[[str], "torch.Tensor | None"]
"""Returns the saved value of a parameter by its name (`finder`)."""


def whole_parameters(
    parts: list[Part], parameters: Mapping[str, torch.Tensor], group: ProcessSet | None
) -> dict[str, torch.Tensor]:
    """Return whole tensors by the names of parameters, in the parameters' memory order.

    Args:
        parts: the parts that this rank has.
        parameters: the parameters by their names.
        group: ranks that have the other parts, over which this is collective; None: there are no other parts.
    """
    gathered = [parts] if group is None else allgather_object(parts, name="local.outer.state", process_set=group)
    whole: dict[str, torch.Tensor] = {}
    for name, begin, end, values in (part for parts in gathered for part in parts):
        if name not in whole:
            whole[name] = torch.zeros_like(parameters[name], dtype=values.dtype, requires_grad=False)
        in_memory_order(whole[name])[begin:end] = values
    return whole


def fill(target: torch.Tensor, piece: Elements, parameter: torch.Tensor, find: Find) -> bool:
    """Write the saved values of a piece of a parameter to `target`, if the parameter has been saved with its shape.

    Args:
        target: a 1-d tensor of the size of the piece.
        piece: the piece.
        parameter: the whole parameter.
        find: returns a saved whole tensor, in any memory order, by the name of its parameter.

    Returns:
        whether the values have been written.
    """
    value = find(piece.name)
    if value is None or value.shape != parameter.shape:
        return False
    ordered = torch.empty_like(parameter, dtype=target.dtype).copy_(value)
    target.copy_(in_memory_order(ordered)[piece.begin : piece.end])
    return True


def warn_unless(found: Sequence[bool], saved: Mapping[str, torch.Tensor]) -> None:
    """Warn that saved models are not used, if some exist but none of those looked for was `found`."""
    if saved and found and not any(found):
        warnings.warn(
            f"LocalSGD: the models of the last averaging in the state are of other parameters ('{next(iter(saved))}', "
            "for example), so they are not used, and changes count from the present models. named_parameters= has "
            "other names, or none",
            RuntimeWarning,
            stacklevel=2,
        )


class Movements(Averaging):
    """Averaging that adds up the changes of the models of all groups, without a codec.

    Args:
        parameters: whole parameters by their names.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._then: list[torch.Tensor] = []  # the models after the last averaging, flat
        self._loaded: Mapping[str, torch.Tensor] = {}  # models of a checkpoint that are not in use yet

    @property
    def begun(self) -> bool:
        return bool(self._then)

    @torch.no_grad()
    def note(self, values: Values, pieces: Pieces) -> None:
        """Begin to count the changes of new tensors.

        Changes count from the values of a checkpoint, or else from the present values.
        """
        known, found = len(self._then), values()
        new = found[known:]
        if not new:
            return
        self._then += [value.clone() for value in new]
        if self._loaded:
            find, filled = finder(self._loaded), []
            for piece in pieces():
                target = _part_of(piece.values, new, self._then[known:])
                if target is not None:
                    filled.append(fill(target, piece, self._parameters[piece.name], find))
            warn_unless(filled, self._loaded)
        self._loaded = {}

    @torch.no_grad()
    def average(self, values: Sequence[torch.Tensor], reduce: Callable[[int], None]) -> None:
        for value, then in zip(values, self._then, strict=True):
            value.sub_(then)
        reduce(Sum)
        for value, then in zip(values, self._then, strict=True):
            value.add_(then)
            then.copy_(value)

    def state(self, values: Values, pieces: Pieces, group: ProcessSet | None) -> dict[str, Any]:
        """Return the models after the last averaging, for checkpoints; {} before the first `note`.

        {} also for shards over a device mesh: a torch checkpoint saves these values only once, so all ranks would
        continue from the models of one shard.
        """
        if any(isinstance(one, LocalShard) for one in self._parameters.values()):
            return {}
        if not self._then:
            return {"outer": dict(self._loaded)} if self._loaded else {}
        found = values()
        parts: list[Part] = []
        for piece in pieces():
            then = _part_of(piece.values, found, self._then)
            if then is not None:
                parts.append((piece.name, piece.begin, piece.end, then))
        return {"outer": whole_parameters(parts, self._parameters, group)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        drop_residuals(state)
        self._then, self._loaded = [], state.get("outer", {})

    def restart(self) -> None:
        self._then, self._loaded = [], {}


def _part_of(
    piece: torch.Tensor, values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Return the elements of `others` at the place that `piece` has in `values`; None: it is in none of them."""
    for value, other in zip(values, others):
        begin = (piece.data_ptr() - value.data_ptr()) // value.element_size()
        if piece.dtype == value.dtype and 0 <= begin < len(value):
            return other[begin : begin + len(piece)]
    return None
