"""Settings of gradient reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sordino.codecs import Codec
from sordino.runtime.collectives.compression import Compression, Compressor
from sordino.runtime.gradients.nonfinite import Evidence, FiniteCheck
from sordino.runtime.gradients.settings_check import SettingsCheck
from sordino.runtime.process_set import ProcessSet


@dataclass(frozen=True)
class Settings:
    """Settings of gradient reduction.

    The fields are arguments of `DistributedOptimizer`, the check of its ranks' settings, and values derived from them.
    """

    op: int
    process_set: ProcessSet
    bucket_bytes: int
    check: SettingsCheck
    compression: type[Compressor] = Compression.none
    codec: Codec | None = None
    passes: int = 1
    predivide: float = 1.0
    sparse_as_dense: bool = False
    groups: tuple[tuple[int, ...], ...] = ()  # parameter indices that the user wants reduced together
    finite: FiniteCheck | None = None
    members: tuple[int, ...] = ()  # identities of the process set's members when the algorithm was chosen
    evaluates_once: bool = False  # the optimizer is known to evaluate a closure once in each step

    def look(self, members: Sequence[int], gradients: Sequence[torch.Tensor]) -> Evidence | None:
        """Return evidence about gradients that are about to be sent; None without check_finite."""
        return None if self.finite is None else Evidence(members, gradients)

    def judge(self, names: Sequence[str], tensors: Sequence[torch.Tensor], together: bool = False) -> None:
        """Check, with check_finite, that parameters to be exchanged are finite; raise NonFinite if not.

        Collective if `together`, or if the ranks ask each other (`FiniteCheck`).
        """
        if self.finite is not None:
            self.finite.judge_parameters(names, tensors, together)

    def guarded(self, optimizer: Any, refused: Callable[[], None]) -> Any:
        """Return the optimizer; with check_finite a wrapper that checks gradients before it steps.

        The wrapper calls `refused` if it does not step.
        """
        return optimizer if self.finite is None else self.finite.guard(optimizer, refused)

    def refusals(self, sent: Iterable[Evidence | None]) -> list[Exception]:
        """Return the errors to raise after gradients have been reduced; none without check_finite.

        Args:
            sent: evidence about the gradients that this rank has sent.
        """
        return [] if self.finite is None else self.finite.verdict(sent)
