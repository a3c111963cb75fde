"""Codecs: how an exchange encodes float32 values in a few bits.

A codec is a frozen dataclass that a setting `compression=` takes, and that ranks compare. Values are encoded in blocks,
each with a scale or a selection of its own (csrc/kernels/codecs.h). `CompressedMean` (compressed_mean.py) averages with
them.

| codec | bits per value | error feedback |
|---|---|---|
| `Int8`, `Float16`, `BFloat16` | 8.25, 16, 16 | no |
| `Int4` | 4.25 | no |
| `TwoBit`, `Sign` | 2.25, 1.25 | yes |
| `TopK` | 0.23 with the defaults | yes |

Gossip sends parameters to workers whose own parameters are near. There, `Int8` and `Int4` send the low bits of integers
(`NearCoder`, csrc/kernels/modulo.h), and the codecs with error feedback cannot be used.

*Error feedback*: what an encoding has lost is added to the values that are encoded next, so that nothing is lost for
good. Source: Seide et al. 2014; Karimireddy et al. 2019.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from sordino._core import kernels
from sordino.errors import UsageError
from sordino.suggestions import meant

if TYPE_CHECKING:
    import torch


class Coder(Protocol):
    """The work of a codec, on contiguous 1-d tensors in host memory."""

    def bytes(self, count: int) -> int:
        """Return the number of bytes of `count` encoded values."""
        ...

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> int:
        """Encode float32 values into a uint8 tensor of `bytes(values.numel())` elements.

        Returns:
            The number of blocks that have a NaN or an infinity. These values are not finite after decoding either.
        """
        ...

    def decode(
        self, encoded: torch.Tensor, values: torch.Tensor, weight: float, add: bool, given: torch.Tensor | None = None
    ) -> None:
        """Write decoded values, times `weight`, to a float32 tensor.

        Args:
            encoded: result of `encode` for as many values.
            values: the tensor that is written.
            weight: factor of the decoded values.
            add: add to the former values of the tensor.
            given: float32 tensor of counts, or None. Counts of values that were sent go up by one.
        """
        ...


class NearCoder(Protocol):
    """The work of a codec for receivers that have values near those that are sent. For tensors as in `Coder`.

    Estimates of the distances between workers are float32 tensors with one element for each block. Q(x) is what
    receivers decode for x.
    """

    def bytes(self, count: int) -> int:
        """Return the number of bytes of `count` encoded values."""
        ...

    def distances(self, moved: torch.Tensor) -> torch.Tensor:
        """Return the estimates for workers that were equal before each moved about as far as this one.

        Args:
            moved: float32 changes of this worker's values.
        """
        ...

    def encode(self, values: torch.Tensor, distances: torch.Tensor, encoded: torch.Tensor) -> int:
        """Encode float32 values into a uint8 tensor of `bytes(values.numel())` elements.

        Returns:
            The number of blocks that have a NaN or an infinity.
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

        They are `weight` times the sum of Q(x) - Q(y) over all sources, where x is a value of the source and y that of
        this worker. Where x or y is not finite, they are not, either.

        Args:
            values: the values of this worker, y.
            own: result of `encode` for `values`.
            sources: results of `encode` of other workers, for as many values.
            weight: factor of each source.
            change: float32 tensor that is written, one element for each value.
            distances: the estimates, which are updated.

        Returns:
            The number of blocks, of all sources together, that were too far away to be decoded. They change nothing.

        Raises:
            UsageError: `own` or `sources` are no result of `encode`.
        """
        ...


@dataclass(frozen=True)
class Codec(ABC):
    """Base class of codecs."""

    feedback: ClassVar[bool] = False
    """Whether error feedback is needed: without it, what the encoding loses would be lost for good."""
    gathered: ClassVar[bool] = False
    """Whether every rank sends all of its values to every other rank, because their sum would be no smaller."""

    @property
    @abstractmethod
    def unit(self) -> int:
        """Number of values that are encoded together: a part that begins at a multiple of it can be decoded alone."""

    @abstractmethod
    def coder(self) -> Coder:
        """Return the object that encodes and decodes."""

    def near_coder(self) -> NearCoder | None:
        """Return the object that encodes for receivers with values nearby; None: the codec cannot be used for them."""
        return None

    def bytes(self, count: int) -> int:
        """Return the number of bytes of `count` encoded values."""
        return self.coder().bytes(count)

    @property
    def relative_size(self) -> float:
        """Bytes of many encoded values, divided by their bytes in float32."""
        many = 1 << 20
        return self.bytes(many) / (4 * many)


class _CoreCoder:
    """A codec of the core."""

    def __init__(self, code: str, block: int, kept: int = 0) -> None:
        self._codec = kernels.Codec(code, block, kept)

    def bytes(self, count: int) -> int:
        return self._codec.bytes(count)

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> int:
        return self._codec.encode(values.data_ptr(), values.numel(), encoded.data_ptr())

    def decode(
        self, encoded: torch.Tensor, values: torch.Tensor, weight: float, add: bool, given: torch.Tensor | None = None
    ) -> None:
        counts = 0 if given is None else given.data_ptr()
        self._codec.decode(encoded.data_ptr(), values.numel(), values.data_ptr(), weight, add, counts)


class _CastCoder:
    """A codec that is a cast to a shorter dtype."""

    def __init__(self, dtype: str) -> None:
        import torch  # settings are made without torch

        self._dtype: torch.dtype = getattr(torch, dtype)

    def bytes(self, count: int) -> int:
        return count * self._dtype.itemsize

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> int:
        narrow = encoded.view(self._dtype)
        narrow.copy_(values)
        return int(not bool(narrow.isfinite().all()))

    def decode(
        self, encoded: torch.Tensor, values: torch.Tensor, weight: float, add: bool, given: torch.Tensor | None = None
    ) -> None:
        wide = encoded.view(self._dtype).to(values.dtype)
        if add:
            values.add_(wide, alpha=weight)
        else:
            values.copy_(wide.mul_(weight))
        if given is not None:
            given.add_(1)


class _ModuloCoder:
    """A modulo code of the core."""

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


class _NearCastCoder:
    """A cast, for receivers with values nearby. It needs no estimates: no value depends on another."""

    def __init__(self, dtype: str) -> None:
        self._cast = _CastCoder(dtype)

    def bytes(self, count: int) -> int:
        return self._cast.bytes(count)

    def distances(self, moved: torch.Tensor) -> torch.Tensor:
        return moved.new_empty(0)

    def encode(self, values: torch.Tensor, distances: torch.Tensor, encoded: torch.Tensor) -> int:
        return self._cast.encode(values, encoded)

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


@dataclass(frozen=True)
class _Blocks(Codec):
    """Base class of codecs with one scale for each block of values.

    Attributes:
        block: values that share a scale; a power of two from 32 to 16384.
    """

    block: int = 128
    code: ClassVar[str]

    def __post_init__(self) -> None:
        self.coder()

    @property
    def unit(self) -> int:
        return self.block

    def coder(self) -> Coder:
        return _CoreCoder(self.code, self.block)


class Int8(_Blocks):
    """8 bits per value: integers from -127 to 127, times a scale per block.

    Attributes:
        block: values that share a scale; a power of two from 32 to 16384.
    """

    code = "int8"

    def near_coder(self) -> NearCoder:
        return _ModuloCoder(8, self.block)


class Int4(_Blocks):
    """4 bits per value: integers from -7 to 7, times a scale per block.

    Attributes:
        block: values that share a scale; a power of two from 32 to 16384.
    """

    code = "int4"

    def near_coder(self) -> NearCoder:
        return _ModuloCoder(4, self.block)


class TwoBit(_Blocks):
    """2 bits per value: the best four levels for normally distributed values, times the block's root mean square.

    Source of the levels: Max 1960, Table I.

    Attributes:
        block: values that share a scale; a power of two from 32 to 16384.
    """

    code = "two_bit"
    feedback = True


class Sign(_Blocks):
    """1 bit per value: its sign, times the block's mean magnitude.

    Source: Bernstein et al. 2018; the scale: Karimireddy et al. 2019.

    Attributes:
        block: values that share a scale; a power of two from 32 to 16384.
    """

    code = "sign"
    feedback = True


@dataclass(frozen=True)
class TopK(Codec):
    """The largest values of each chunk, with their positions.

    Source: Sarfi et al. 2025 (SparseLoCo): 64 values of 4096, with 2 bits each. The levels of 2 bits are the means of
    the larger and of the smaller magnitudes.

    Attributes:
        ratio: part of the values that is sent, in (0, 1].
        chunk: values among which the largest are chosen; a power of two from 32 to 16384.
        bits: bits of a value that is sent: 2, or 32 for its exact value.
        contributors: the mean of a value is over the ranks that have sent it, as in SparseLoCo; otherwise over all
            ranks, with 0 for those that have not.
    """

    ratio: float = 1 / 64
    chunk: int = 4096
    bits: int = 2
    contributors: bool = False
    feedback = True
    gathered = True

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise UsageError(f"TopK(ratio={self.ratio}): must be above 0, and at most 1")
        if self.bits not in (2, 32):
            raise UsageError(f"TopK(bits={self.bits}): must be 2 or 32")
        self.coder()

    @property
    def unit(self) -> int:
        return self.chunk

    def coder(self) -> Coder:
        kept = max(1, round(self.ratio * self.chunk))
        return _CoreCoder("top" if self.bits == 2 else "top_exact", self.chunk, kept)


class _Cast(Codec):
    """Base class of casts."""

    dtype: ClassVar[str]

    @property
    def unit(self) -> int:
        return 1

    def coder(self) -> Coder:
        return _CastCoder(self.dtype)

    def near_coder(self) -> NearCoder:
        return _NearCastCoder(self.dtype)

    def bytes(self, count: int) -> int:
        return 2 * count


class Float16(_Cast):
    """16 bits per value: float16. Values beyond its range become infinite."""

    dtype = "float16"


class BFloat16(_Cast):
    """16 bits per value: bfloat16, which has the range of float32 and fewer digits."""

    dtype = "bfloat16"


CODECS: dict[str, type[Codec]] = {
    "int8": Int8,
    "int4": Int4,
    "twobit": TwoBit,
    "sign": Sign,
    "topk": TopK,
    "float16": Float16,
    "bfloat16": BFloat16,
}
"""Codecs by the name that a command line uses."""


def codec_of(given: Codec | str | None, owner: str) -> Codec | None:
    """Return the codec that a setting names.

    Args:
        given: a codec; None or "none" for no compression; or text such as "int4" or "Int4(block=64)".
        owner: the setting, for errors.

    Raises:
        UsageError: there is no such codec.
    """
    if given is None or isinstance(given, Codec):
        return given
    if not isinstance(given, str):
        raise UsageError(f"{owner}={given!r}: must be a codec, such as Int8(), or its name")
    if given.lower() == "none":
        return None
    name, settings = _parsed(given, owner)
    cls = CODECS.get(name.lower().replace("_", "").replace("-", ""))
    if cls is None:
        known = [one.__name__ for one in CODECS.values()]
        raise UsageError(
            f"{owner}={given!r}: there is no such codec; use one of {', '.join(known)}{meant(name, known)}"
        )
    unknown = settings.keys() - {one.name for one in fields(cls)}
    if unknown:
        raise UsageError(f"{owner}={given!r}: {cls.__name__} has no setting {', '.join(sorted(unknown))}")
    return cls(**settings)


def _parsed(text: str, owner: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings in text such as "TopK(ratio=0.01)"."""
    name, bracket, _ = text.partition("(")
    if not bracket:
        return text, {}
    try:
        call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            return name, {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (ValueError, SyntaxError, TypeError):
        pass
    raise UsageError(f"{owner}={text!r}: must be a codec's name, or a name with settings such as Int8(block=64)")
