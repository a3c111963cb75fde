"""Mean over ranks of values that are sent encoded.

    values + what was lost before -> encoded -> all-to-all -> decoded and added in float32 -> mean of this rank's shard
    mean + what was lost before   -> encoded -> all-gather -> decoded by every rank

So a value is encoded at most twice, and all ranks decode the same bytes: the mean has the same bits everywhere. A codec
whose sums are no smaller than their parts (`Codec.gathered`) is encoded once, and every rank decodes those of all.

*Residuals* are what encodings have lost (error feedback). They change only when the mean is complete: an operation that
fails loses nothing.
"""

from __future__ import annotations

import warnings
from typing import Protocol

import torch

from sordino.codecs import Codec, TopK
from sordino.errors import UsageError
from sordino.runtime.collectives.autograd import allgather, alltoall
from sordino.runtime.process_set import ProcessSet


class Transfers(Protocol):
    """The two collectives of some ranks, on contiguous uint8 tensors in host memory."""

    size: int
    """Number of ranks."""

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Send the n-th part of `sent` to rank n, and receive its part for this rank into the n-th of `received`."""

    def all_gather(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Receive what rank n has sent into the n-th part of `received`."""


class SetTransfers:
    """The collectives of a process set.

    Args:
        name: name of the operations, the same on all ranks.
        process_set: the ranks.
    """

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name, self._process_set = name, process_set
        self.size = len(process_set.ranks or [])

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        alltoall(sent, name=f"{self._name}.scatter", process_set=self._process_set, out=received)

    def all_gather(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        allgather(sent, f"{self._name}.gather", self._process_set, out=received)


class CompressedMean:
    """Mean over some ranks, to be computed repeatedly for the same number of values.

    Args:
        count: number of values.
        codec: the codec, the same on all ranks.
        name: what the values are, for errors.
        transfers: the collectives of the ranks.
    """

    def __init__(self, count: int, codec: Codec, name: str, transfers: Transfers) -> None:
        self.count, self._codec, self._name, self._transfers = count, codec, name, transfers
        self._coder = codec.coder()
        self._size = transfers.size
        unit = codec.unit
        self._shard = count if codec.gathered else -(-count // (self._size * unit)) * unit
        """Values of a rank's shard; all ranks' shards together may be longer than the values, and then end with 0."""
        total = count if codec.gathered else self._shard * self._size
        self._work = torch.zeros(total)
        self._sent = torch.empty(self._coder.bytes(total), dtype=torch.uint8)
        self._received = torch.empty(self._sent.numel() * (self._size if codec.gathered else 1), dtype=torch.uint8)
        self.residuals: list[torch.Tensor] = []
        """What this rank has not sent yet, for each of the encodings."""
        if codec.gathered:
            self._given = torch.empty(count) if isinstance(codec, TopK) and codec.contributors else None
        else:
            self._mean, self._whole = torch.zeros(self._shard), torch.empty(total)
            self._encoded_mean = torch.empty(self._coder.bytes(self._shard), dtype=torch.uint8)
        if codec.feedback:
            self.residuals = [torch.zeros(total)]
            if not codec.gathered:
                self.residuals.append(torch.zeros(self._shard))

    @torch.no_grad()
    def run(self, values: torch.Tensor) -> None:
        """Replace values by their mean over all ranks. Collective. With one rank they stay as they are.

        A NaN or an infinity makes the means of its block NaN on all ranks, with a warning on the rank that has it, and
        residuals of the block become 0.

        Args:
            values: float32 tensor [count] in host memory.

        Raises:
            UsageError: `values` are other than described.
            PeerLost, Timeout, TransportError: the operation has failed. The residuals are unchanged.
        """
        fits = values.dtype == torch.float32 and values.shape == (self.count,) and values.is_contiguous()
        if not fits or values.device.type != "cpu":
            raise UsageError(
                f"{self._name}: values are {values.dtype} {tuple(values.shape)} on {values.device}, and must be "
                f"contiguous float32 ({self.count},) on the CPU"
            )
        if self._size <= 1 or self.count == 0:
            return
        work = self._work
        work[: self.count].copy_(values)
        if self.residuals:
            work.add_(self.residuals[0])
        infinite = self._coder.encode(work, self._sent)
        if self._codec.gathered:
            self._gather(values)
        else:
            self._scatter_and_gather(values)
        if self.residuals:
            self._keep_rest(work, self._sent, self.residuals[0])
        if infinite > 0:
            warnings.warn(
                f"{self._name}: {infinite} block{'s' * (infinite != 1)} of {self._codec.unit} values of this rank "
                "have a NaN or an infinity, so their means are NaN on all ranks",
                RuntimeWarning,
                stacklevel=3,
            )

    def _gather(self, values: torch.Tensor) -> None:
        """Decode what all ranks have sent to all."""
        self._transfers.all_gather(self._sent, self._received)
        given = self._given
        if given is not None:
            given.zero_()
        weight = 1.0 if given is not None else 1 / self._size
        for number, encoded in enumerate(self._received.chunk(self._size)):
            self._coder.decode(encoded, values, weight, number > 0, given)
        if given is not None:
            values.div_(given.clamp_(min=1))

    def _scatter_and_gather(self, values: torch.Tensor) -> None:
        """Add up this rank's shard, and decode the means of all shards."""
        self._transfers.all_to_all(self._sent, self._received)
        mean = self._mean
        for number, encoded in enumerate(self._received.chunk(self._size)):
            self._coder.decode(encoded, mean, 1 / self._size, number > 0)
        if self.residuals:
            mean.add_(self.residuals[1])
        self._coder.encode(mean, self._encoded_mean)
        self._transfers.all_gather(self._encoded_mean, self._received)
        if self.residuals:
            self._keep_rest(mean, self._encoded_mean, self.residuals[1])
        self._coder.decode(self._received, self._whole, 1.0, False)
        values.copy_(self._whole[: self.count])

    def _keep_rest(self, values: torch.Tensor, encoded: torch.Tensor, residual: torch.Tensor) -> None:
        """Keep what an encoding has lost: the values less what all decode."""
        self._coder.decode(encoded, values, -1.0, True)
        residual.copy_(values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
