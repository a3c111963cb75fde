"""Arguments of `DistributedOptimizer`, after their types have been checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sordino.codecs import Codec
from sordino.errors import UsageError
from sordino.runtime.collectives.compression import Compression, Compressor
from sordino.runtime.collectives.operation import Adasum, Average, require_finite
from sordino.runtime.process_set import ProcessSet

Groups = int | Sequence[Sequence[torch.Tensor]] | None


@dataclass(frozen=True)
class Options:
    """Options of a wrapped optimizer.

    Attributes:
        algorithm: a `sordino.algorithms.Algorithm`.
        codec: the codec given as `compression=`, in which case `compression` is `Compression.none`; None: no codec.
        members: identities of the process set's members when the algorithm was chosen.
        mesh: whether the process set is a dimension of a device mesh (`mesh=`), so that parameters may be DTensors.

    The other fields are arguments of `DistributedOptimizer`.
    """

    algorithm: Any
    compression: type[Compressor]
    codec: Codec | None
    backward_passes_per_step: int
    op: int
    gradient_predivide_factor: float
    groups: Groups
    sparse_as_dense: bool
    process_set: ProcessSet
    named_buffers: list[tuple[str, torch.Tensor]] | None
    check_finite: bool
    members: tuple[int, ...]
    mesh: bool = False

    @property
    def averages(self) -> bool:
        """Whether `op` is the mean."""
        return self.op == Average

    @property
    def adasum(self) -> bool:
        """Whether `op` is Adasum."""
        return self.op == Adasum

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed."""
        return self.codec is not None or self.compression is not Compression.none

    def check(self) -> None:
        """Raise UsageError for options that are invalid or that the algorithm does not use."""
        if not isinstance(self.check_finite, bool):
            raise UsageError(f"check_finite={self.check_finite!r}: must be True or False")
        require_finite("gradient_predivide_factor", self.gradient_predivide_factor)
        if self.gradient_predivide_factor == 0:
            raise UsageError("gradient_predivide_factor=0: gradients are divided by it, so it must not be 0")
        if self.codec is not None and not (self.averages and self.gradient_predivide_factor == 1):
            raise UsageError(f"compression={self.codec} always averages: op= and gradient_predivide_factor= do not fit")
        averages = self.algorithm.traits.averages_buffers
        if averages and self.named_buffers is None:
            raise UsageError(f'{self.algorithm.label}(buffers="average") needs named_buffers=model.named_buffers()')
        if not averages and self.named_buffers is not None:
            raise UsageError(f'named_buffers has no effect with {self.algorithm}; it needs buffers="average"')
        self.algorithm.check(self)
