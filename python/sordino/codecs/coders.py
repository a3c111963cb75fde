"""Coders: objects that encode and decode tensors for a `FlatCodec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from sordino._core import Device, kernels

if TYPE_CHECKING:
    import torch


class Coder(Protocol):
    """Encoder and decoder for contiguous 1-d tensors on the coder's device: in host memory, or on a GPU.

    On a GPU the work is put on the current stream, and no method waits for it. Codes and values have the same bits on
    all devices, except for NaNs: a NaN stays a NaN, with any bits.
    """

    def bytes(self, count: int) -> int:
        """Return the number of bytes of `count` encoded values."""
        ...

    def encode(self, values: torch.Tensor, encoded: torch.Tensor, infinite: torch.Tensor) -> None:
        """Encode float32 values.

        Args:
            values: float32 tensor.
            encoded: uint8 tensor of `bytes(values.numel())` elements, which is written.
            infinite: int32 tensor [1]. The number of blocks with a NaN or an infinity is added to it. A cast adds the
                number of values that are not finite in its dtype. Such values are not finite after decoding either.
        """
        ...

    def decode(
        self, encoded: torch.Tensor, values: torch.Tensor, weight: float, add: bool, given: torch.Tensor | None = None
    ) -> None:
        """Write decoded values, times `weight`, to a float32 tensor.

        Args:
            encoded: result of `encode` for `values.numel()` values.
            values: the tensor that is written.
            weight: factor of the decoded values.
            add: whether to add to the values of the tensor, instead of replacing them.
            given: float32 tensor of counts, or None. The count of each value that `encoded` has goes up by one.

        Raises:
            UsageError: `encoded` has a position beyond the end of a block. On a GPU, such values are left out.
        """
        ...


class NearCoder(Protocol):
    """Encoder and decoder for receivers that have values near the sent values, for tensors in host memory.

    `distances` is a float32 tensor with an estimate for each block: the largest |x - y| of two workers. Q(x) is what
    receivers decode for x.
    """

    def bytes(self, count: int) -> int:
        """Return the number of bytes of `count` encoded values."""
        ...

    def distances(self, moved: torch.Tensor) -> torch.Tensor:
        """Return the estimates for workers that had equal values, and then moved about as far as this one.

        Args:
            moved: float32 changes of this worker's values.
        """
        ...

    def encode(self, values: torch.Tensor, distances: torch.Tensor, encoded: torch.Tensor) -> int:
        """Encode float32 values into a uint8 tensor of `bytes(values.numel())` elements.

        Returns:
            The number of blocks with a NaN, an infinity or a value that is too large. For a cast: of values that are
            not finite in its dtype.
        """
        ...

    def change(
        self,
        values: torch.Tensor,
        own: torch.Tensor,
        sources: Sequence[torch.Tensor],
        weight: float,
        change: torch.Tensor,
        distances: torch.Tensor,
    ) -> int:
        """Write the changes of a worker that mixes, and update its estimates.

        A change is `weight` times the sum of Q(x) - Q(y) over all sources, where x is the value of the source and y the
        value of this worker. It is not finite if x or y is not finite.

        Args:
            values: the values of this worker, y.
            own: result of `encode` for `values`.
            sources: results of `encode` of other workers, for as many values.
            weight: factor of each source.
            change: float32 tensor that is written, one element for each value.
            distances: the estimates, which are updated.

        Returns:
            The number of blocks, over all sources, that were too far away to be decoded. They add nothing to `change`.

        Raises:
            UsageError: `own` or one of `sources` is not a result of `encode`.
        """
        ...


class CoreCoder:
    """Coder that uses a codec of the core.

    Args:
        code: name of the codec in the core.
        block: values of a block.
        kept: values that a sparse codec sends of each block; 0 for other codecs.
        device: device of the tensors; None: host memory.
    """

    def __init__(self, code: str, block: int, kept: int = 0, device: Device | None = None) -> None:
        self._codec, self._device = kernels.Codec(code, block, kept), device

    def bytes(self, count: int) -> int:
        return self._codec.bytes(count)

    def encode(self, values: torch.Tensor, encoded: torch.Tensor, infinite: torch.Tensor) -> None:
        places = (values.data_ptr(), values.numel(), encoded.data_ptr())
        if self._device is None:
            infinite.add_(self._codec.encode(*places))
        else:
            self._device.encode(self._codec, *places, infinite.data_ptr())

    def decode(
        self, encoded: torch.Tensor, values: torch.Tensor, weight: float, add: bool, given: torch.Tensor | None = None
    ) -> None:
        counts = 0 if given is None else given.data_ptr()
        places = (encoded.data_ptr(), values.numel(), values.data_ptr())
        if self._device is None:
            self._codec.decode(*places, weight, add, counts)
        else:
            self._device.decode(self._codec, *places, weight, add, counts)


class CastCoder:
    """Coder that casts to a shorter dtype, on any device."""

    def __init__(self, dtype: str) -> None:
        import torch  # here, because codecs can be constructed without torch

        self._dtype: torch.dtype = getattr(torch, dtype)

    def bytes(self, count: int) -> int:
        return count * self._dtype.itemsize

    def encode(self, values: torch.Tensor, encoded: torch.Tensor, infinite: torch.Tensor) -> None:
        narrow = encoded.view(self._dtype)
        narrow.copy_(values)
        infinite.add_(narrow.isfinite().logical_not_().sum())

    def decode(
        self, encoded: torch.Tensor, values: torch.Tensor, weight: float, add: bool, given: torch.Tensor | None = None
    ) -> None:
        # Two operations, because a fused multiply-add, as on some devices, rounds differently.
        wide = encoded.view(self._dtype).to(values.dtype).mul_(weight)
        if add:
            values.add_(wide)
        else:
            values.copy_(wide)
        if given is not None:
            given.add_(1)


class ModuloCoder:
    """Coder that uses a modulo code of the core."""

    def __init__(self, bits: int, block: int) -> None:
        self._codec, self._block = kernels.ModuloCodec(bits, block), block

    def bytes(self, count: int) -> int:
        return self._codec.bytes(count)

    def distances(self, moved: torch.Tensor) -> torch.Tensor:
        padded = moved.new_zeros(self._codec.blocks(moved.numel()) * self._block)
        padded[: moved.numel()] = moved.abs().nan_to_num_(nan=0.0, posinf=0.0)
        return 2 * padded.view(-1, self._block).amax(dim=1)

    def encode(self, values: torch.Tensor, distances: torch.Tensor, encoded: torch.Tensor) -> int:
        return self._codec.encode(values.data_ptr(), values.numel(), distances.data_ptr(), encoded.data_ptr())

    def change(
        self,
        values: torch.Tensor,
        own: torch.Tensor,
        sources: Sequence[torch.Tensor],
        weight: float,
        change: torch.Tensor,
        distances: torch.Tensor,
    ) -> int:
        places = [one.data_ptr() for one in sources]
        into = (change.data_ptr(), distances.data_ptr())
        return self._codec.change(values.data_ptr(), values.numel(), own.data_ptr(), places, weight, *into)


class NearCastCoder:
    """`NearCoder` that casts, without estimates: decoding does not depend on the receiver's values."""

    def __init__(self, dtype: str) -> None:
        self._cast = CastCoder(dtype)

    def bytes(self, count: int) -> int:
        return self._cast.bytes(count)

    def distances(self, moved: torch.Tensor) -> torch.Tensor:
        return moved.new_empty(0)

    def encode(self, values: torch.Tensor, distances: torch.Tensor, encoded: torch.Tensor) -> int:
        import torch

        infinite = values.new_zeros(1, dtype=torch.int32)
        self._cast.encode(values, encoded, infinite)
        return int(infinite)

    def change(
        self,
        values: torch.Tensor,
        own: torch.Tensor,
        sources: Sequence[torch.Tensor],
        weight: float,
        change: torch.Tensor,
        distances: torch.Tensor,
    ) -> int:
        change.zero_()
        for one in sources:
            self._cast.decode(one, change, weight, True)
            self._cast.decode(own, change, -weight, True)
        return 0
