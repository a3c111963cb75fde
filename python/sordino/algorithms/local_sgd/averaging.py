"""Averaging of the models of groups: of whole models, of changes that are added up, or of encoded changes.

| class | used | each model becomes |
|---|---|---|
| `MeanOfModels` (strategy.py) | by default | the mean |
| `Movements` (movements.py) | with aggregate="gradients" | the last average plus the changes of all groups |
| `EncodedAveraging` (encoded.py) | with a codec | the last average plus the mean, or sum, of all changes |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from sordino.algorithms.diloco.fragment import Elements
from sordino.runtime.exchange.saved_residuals import drop
from sordino.runtime.process_set import ProcessSet

Values = Callable[[], Sequence[torch.Tensor]]
"""Returns the tensors that a rank averages with its peers, flat. Later calls may return more, after the first ones."""
Pieces = Callable[[], Iterable[Elements]]
"""Returns the parameters, or the parts of them, that are in these tensors."""
RESIDUALS_OF = "averagings of LocalSGD"


def drop_residuals(state: Mapping[str, Any]) -> None:
    """Warn if a state has residuals, which are lost without a codec."""
    drop(state.get("residuals", {}), RESIDUALS_OF, "they are not encoded here")


class Averaging(ABC):
    """Base class of averagings among peers, the ranks with the same position in their groups.

    Attributes:
        counts_changes: whether changes of models are averaged, so that `note` has an effect.
    """

    counts_changes: ClassVar[bool] = True

    @property
    def begun(self) -> bool:
        """Whether this object holds the models from which changes are counted."""
        return False

    def note(self, values: Values, pieces: Pieces) -> None:  # noqa: B027
        """Begin to count the changes of new tensors."""

    @abstractmethod
    def average(self, values: Sequence[torch.Tensor], reduce: Callable[[int], None]) -> None:
        """Replace the tensors by their averages. Collective over the peers.

        Args:
            values: the tensors.
            reduce: reduces `values` over the peers by an operation, such as `Average`.
        """

    def state(self, values: Values, pieces: Pieces, group: ProcessSet | None) -> dict[str, Any]:
        """Return the state for checkpoints.

        Args:
            values: see `Values`. Not called before the first `note`: after a loss, data of an abandoned averaging may
                still arrive in these tensors.
            pieces: see `Pieces`.
            group: ranks that have the other parts of the parameters, over which this is collective; None: there are no
                other parts.
        """
        return {}

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; if it is empty, from the models of the next `note`."""

    def restart(self) -> None:  # noqa: B027
        """Forget all state. The next `note` begins anew; all peers must have equal models then."""
