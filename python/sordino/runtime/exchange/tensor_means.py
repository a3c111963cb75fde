"""Means of tensors with a codec of any kind: the interface that reducers of gradients use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sordino.codecs import Codec, FlatCodec, PowerSGD
from sordino.errors import UsageError
from sordino.runtime.exchange.compressed_mean import CompressedMean
from sordino.runtime.exchange.low_rank_mean import LowRankMean
from sordino.runtime.exchange.residuals import Encoded
from sordino.runtime.exchange.transfers import Transfers


class TensorMean(Encoded, Protocol):
    """Mean over some ranks of tensors, to be computed repeatedly for the same shapes.

    The residuals for all values are those of the tensors' elements, one tensor after the other.
    """

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their means over all ranks. Collective.

        All ranks get the same bits. If one of its values is not finite, a mean is not finite, and the rank that has the
        value warns (`report`).

        Args:
            tensors: floating-point tensors with the shapes of this object, of any strides, on one device.

        Raises:
            PeerLost, Timeout, TransportError: the operation has failed. The tensors and this object are unchanged. On a
                GPU `run` may return before the operation is complete. If it fails then, a later operation raises the
                error, and the tensors and residuals must not be used.
        """
        ...

    def report(self) -> None:
        """Warn if the tensors of the last complete `run` were not finite. Not collective.

        It waits for the first part of that `run` on a GPU. Call it after each `run`, or after the `run`s of several
        objects, so that the GPU has work meanwhile.
        """
        ...


def mean_of(codec: Codec, tensors: Sequence[torch.Tensor], name: str, transfers: Transfers) -> TensorMean:
    """Return the object that averages tensors like these.

    Args:
        codec: the codec, the same on all ranks.
        tensors: tensors with the shapes and the device of the tensors to average.
        name: what the tensors are, for errors.
        transfers: the collectives of the ranks.

    Raises:
        UsageError: a tensor is not floating-point.
    """
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise UsageError(f"{name}: compression={codec} averages floating-point tensors, and not {tensor.dtype}")
    if isinstance(codec, PowerSGD):
        return LowRankMean(codec, tensors, name, transfers)
    assert isinstance(codec, FlatCodec)
    return FlatMean(codec, tensors, name, transfers)


class FlatMean:
    """Mean of the values of tensors, one after the other, on their device. Arguments are those of `mean_of`."""

    def __init__(self, codec: FlatCodec, tensors: Sequence[torch.Tensor], name: str, transfers: Transfers) -> None:
        self._counts = [tensor.numel() for tensor in tensors]
        self._mean = CompressedMean(sum(self._counts), codec, name, transfers, device=tensors[0].device)

    @property
    def residuals(self) -> list[torch.Tensor]:
        return self._mean.residuals

    @torch.no_grad()
    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        self._mean.begin(torch.cat([tensor.reshape(-1) for tensor in tensors]).to(torch.float32))
        for tensor, part in zip(tensors, self._mean.finish().split(self._counts)):
            tensor.copy_(part.view_as(tensor))

    def report(self) -> None:
        self._mean.report()
