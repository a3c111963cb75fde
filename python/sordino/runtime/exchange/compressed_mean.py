"""Mean over ranks of values that are sent encoded.

    values + residual -> encoded -> all-to-all -> decoded and added in float32 -> mean of this rank's shard
    mean + residual   -> encoded -> all-gather -> decoded by every rank

So a value is encoded at most twice, and all ranks decode the same bytes: the mean has the same bits everywhere. With a
codec whose sums are no smaller than their parts (`FlatCodec.gathered`), values are encoded once, and every rank decodes
the values of all ranks.

*Residuals* are what encodings have lost so far (error feedback). They change only when the mean is complete: an
operation that fails loses nothing. NCCL is an exception: its operations return when they are queued on the GPU. If one
fails later, residuals have changed, and means may be wrong.

All of this happens on the device of the values, or on the CPU if the core does not support the device. On a GPU the
work is queued on the current stream. Only `report` waits for a GPU: for the encoding of this rank's values. So a caller
with several means finishes all of them before it calls `report`.
"""

from __future__ import annotations

import warnings
from contextlib import suppress

import torch

from sordino.codecs import FlatCodec, TopK
from sordino.errors import UsageError
from sordino.runtime.devices import HOST, core_device, encoding_device
from sordino.runtime.exchange.block_count import BlockCount
from sordino.runtime.exchange.transfers import Received, Transfers
from sordino.runtime.recovery.losses import LOSSES


class CompressedMean:
    """Mean over some ranks, to be computed repeatedly for the same number of values.

    Args:
        count: number of values.
        codec: the codec, the same on all ranks.
        name: what the values are, for errors.
        transfers: the collectives of the ranks.
        kept: factor of the residuals when they are added, from 0 to 1; β in SparseLoCo.
        device: device of the values. Unless it is a CPU or a CUDA device, values are encoded on the CPU, and sent from
            its memory.

    Raises:
        NotBuilt: the codec needs kernels of the core for a CUDA device, and this build has none.
    """

    def __init__(
        self,
        count: int,
        codec: FlatCodec,
        name: str,
        transfers: Transfers,
        kept: float = 1.0,
        device: torch.device = HOST,
    ) -> None:
        self.count, self._codec, self._name, self._transfers, self._kept = count, codec, name, transfers, kept
        self._size, self._device, self._place = transfers.size, device, encoding_device(device)
        device = self._place
        self._coder = codec.coder(core_device(device) if self._sends and codec.in_core else None)
        self._shard = count if codec.gathered else -(-count // (self._size * codec.unit)) * codec.unit
        """Number of values of a rank's shard. All shards together may have more than `count`: the rest is padding."""
        total = count if codec.gathered else self._shard * self._size
        self._own = min(max(count - transfers.place * self._shard, 0), self._shard)
        """Number of values of this rank's shard without padding, which would lower the scale of the last block."""
        self._work = torch.zeros(total, dtype=torch.float32, device=device)
        """The values to be sent, and later their means."""
        self._sent = torch.zeros(self._coder.bytes(total), dtype=torch.uint8, device=device)
        counts = isinstance(codec, TopK) and codec.contributors
        self._given = torch.empty(count, dtype=torch.float32, device=device) if counts else None
        self._mean = torch.empty(0 if codec.gathered else self._shard, dtype=torch.float32, device=device)
        self._received: Received | None = None  # None: nothing is in flight
        self._infinite = BlockCount(device)
        self._unreported = False  # whether `report` has not read the count of the last complete mean
        self._of_means = torch.zeros(1, dtype=torch.int32, device=device)  # a count that is never read
        self.residuals: list[torch.Tensor] = []
        """Values that this rank still has to send, for each of the encodings."""
        if codec.feedback:
            lengths = [total] if codec.gathered else [total, self._shard]
            self.residuals = [torch.zeros(length, dtype=torch.float32, device=device) for length in lengths]

    @torch.no_grad()
    def begin(self, values: torch.Tensor) -> None:
        """Encode values, and start to send them. Collective.

        A NaN or an infinity makes the means of its block (with TopK, of its values that are sent) NaN on all ranks, and
        their residuals 0. The rank that has it warns (`report`). With a cast, means of values that are not finite in
        its dtype are not finite on any rank, with the same warning.

        Args:
            values: float32 tensor [count] on the device. The caller may change it afterwards.

        Raises:
            UsageError: `values` has another dtype, shape or device, or is not contiguous.
            PeerLost, Timeout, TransportError: the operation has failed.
        """
        fits = values.dtype == torch.float32 and values.shape == (self.count,) and values.is_contiguous()
        if not fits or values.device != self._device:
            raise UsageError(
                f"{self._name}: values are {values.dtype} {tuple(values.shape)} on {values.device}, and must be "
                f"contiguous float32 ({self.count},) on {self._device}"
            )
        self.report()
        self._work[: self.count].copy_(values)
        if not self._sends:
            return
        if self.residuals:
            self._work.add_(self._still_owed(self.residuals[0]))
        self._infinite.value.zero_()
        self._encode(self._work[: self.count], self._sent, self._infinite.value)
        self._infinite.send()
        start = self._transfers.all_gather if self._codec.gathered else self._transfers.all_to_all
        self._received = start(self._sent)

    @torch.no_grad()
    def finish(self) -> torch.Tensor:
        """Wait for the transfer that `begin` started, and return the means; with one rank, its values. Collective.

        Returns:
            float32 tensor [count] on the device of the encoding (`encoding_device`), valid until the next `begin`.

        Raises:
            PeerLost, Timeout, TransportError: the operation has failed. The residuals are unchanged. If it fails on a
                GPU after `finish` has returned, a later operation raises the error. Then residuals and means must not
                be used.
        """
        if not self._sends:
            return self._work[: self.count]
        encoded = self._arrived() if self._codec.gathered else self._encoded_means()
        if self.residuals:
            self._keep_rest(self._work, self._sent, self.residuals[0], self.count)
        if self._codec.gathered:
            self._add_up(encoded, self._work)
        else:
            self._coder.decode(encoded, self._work, 1.0, False)
        self._unreported = True
        return self._work[: self.count]

    def report(self) -> None:
        """Warn if some values of the last complete mean were not finite. Not collective.

        It waits for the encoding of these values, which a GPU does after all earlier work of its stream. So call it
        once for each mean, when all other work is queued. Otherwise the next `begin` calls it.
        """
        if not self._unreported:
            return
        self._unreported = False
        infinite = self._infinite.read()
        if infinite > 0:
            warnings.warn(
                f"{self._name}: {self._codec.not_finite(infinite)}, so their means are not finite on any rank",
                RuntimeWarning,
                stacklevel=2,
            )

    def give_up(self) -> None:
        """Wait for the transfer that `begin` started, and drop its result. Not collective if all ranks have begun."""
        if self._received is not None:
            with suppress(*LOSSES):
                self._received()
            self._received = None

    def _arrived(self) -> torch.Tensor:
        """Wait for the bytes that ranks have sent to this one. Return them, and keep no reference to them."""
        received, self._received = self._received, None
        assert received is not None
        return received()

    @property
    def _sends(self) -> bool:
        return self._size > 1 and self.count > 0

    def _add_up(self, received: torch.Tensor, mean: torch.Tensor) -> None:
        """Decode the values that all ranks have sent, and write their mean."""
        given = self._given
        if given is not None:
            given.zero_()
        weight = 1.0 if given is not None else 1 / self._size
        for number, encoded in enumerate(received.chunk(self._size)):
            self._coder.decode(encoded, mean, weight, number > 0, given)
        if given is not None:
            mean.div_(given.clamp_(min=1))

    def _encoded_means(self) -> torch.Tensor:
        """Compute the mean of this rank's shard, and send it to all ranks. Return the encoded means of all shards."""
        mean = self._mean
        self._add_up(self._arrived(), mean)  # the parts are freed before the means arrive
        if self.residuals:
            mean.add_(self._still_owed(self.residuals[1]))
        encoded = torch.zeros(self._coder.bytes(self._shard), dtype=torch.uint8, device=self._place)
        self._encode(mean[: self._own], encoded, self._of_means)
        means = self._transfers.all_gather(encoded)()
        if self.residuals:
            self._keep_rest(mean, encoded, self.residuals[1], self._own)
        return means

    def _encode(self, values: torch.Tensor, encoded: torch.Tensor, infinite: torch.Tensor) -> None:
        """Encode values into the beginning of `encoded`."""
        if len(values) > 0:
            self._coder.encode(values, encoded[: self._coder.bytes(len(values))], infinite)

    def _still_owed(self, residual: torch.Tensor) -> torch.Tensor:
        """Return a residual times its factor, rounded before the sum, so that all devices get the same bits."""
        return residual if self._kept == 1 else residual * self._kept

    def _keep_rest(self, values: torch.Tensor, encoded: torch.Tensor, residual: torch.Tensor, count: int) -> None:
        """Store what an encoding has lost: the first `count` values minus their decoded values. The rest is padding."""
        if count > 0:
            rest = values[:count]
            self._coder.decode(encoded[: self._coder.bytes(count)], rest, -1.0, True)
            residual[:count].copy_(rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
