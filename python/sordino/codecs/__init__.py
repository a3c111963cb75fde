"""Codecs: how ranks send the values of a mean in fewer bytes.

A codec is a frozen dataclass that a setting `compression=` takes, and that ranks compare. There are two kinds.

A `FlatCodec` encodes float32 values in blocks, each with a scale or a selection of its own (csrc/kernels/codecs.h).
`CompressedMean` (compressed_mean.py) averages with it.

| codec | bits per value | error feedback |
|---|---|---|
| `Int8`, `Float16`, `BFloat16` | 8.25, 16, 16 | no |
| `Int4` | 4.25 | no |
| `TwoBit`, `Sign` | 2.25, 1.25 | yes |
| `TopK` | 0.23 with the defaults | yes |

Gossip sends parameters to workers whose own parameters are near. There, `Int8` and `Int4` send the low bits of integers
(`NearCoder`, csrc/kernels/modulo.h), and the codecs with error feedback cannot be used.

`PowerSGD` needs the shapes of gradients: it sends two thin factors of each matrix (`LowRankMean`, low_rank_mean.py),
with error feedback.

*Error feedback*: what an encoding has lost is added to the values that are encoded next, so that no change is lost
permanently. Source: Seide et al. 2014; Karimireddy et al. 2019.
"""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from sordino._core import Device
from sordino.codecs.coders import CastCoder, Coder, CoreCoder, ModuloCoder, NearCastCoder, NearCoder
from sordino.errors import UsageError
from sordino.literals import expression
from sordino.suggestions import meant


@dataclass(frozen=True)
class Codec:
    """Base class of codecs, which `compression=` of `DistributedOptimizer` takes."""

    feedback: ClassVar[bool] = False
    """Whether the codec needs error feedback, because its encoding loses too much."""


@dataclass(frozen=True)
class FlatCodec(Codec, ABC):
    """Base class of codecs that encode float32 values regardless of shapes."""

    in_core: ClassVar[bool] = True
    """Whether kernels of the core encode and decode. Otherwise torch does, on any device."""
    gathered: ClassVar[bool] = False
    """Whether every rank sends all of its values to every other rank, because their sum would be no smaller."""

    @property
    @abstractmethod
    def unit(self) -> int:
        """Number of values that are encoded together: a part that begins at a multiple of it can be decoded alone."""

    @abstractmethod
    def coder(self, device: Device | None = None) -> Coder:
        """Return the object that encodes and decodes.

        Args:
            device: the core's device of the tensors; None: host memory. Without effect if not `in_core`.
        """

    def near_coder(self) -> NearCoder | None:
        """Return the object that encodes for receivers whose own values are near; None: the codec cannot do that."""
        return None

    def not_finite(self, number: int, faults: str = "a NaN or an infinity") -> str:
        """Return the beginning of a warning about non-finite values: "2 blocks of 128 values of this rank ...".

        Args:
            number: number that `encode` has counted, at least 1.
            faults: faults that a block can have. Codecs without blocks ignore it.
        """
        blocks, have = ("blocks", "have") if number > 1 else ("block", "has")
        return f"{number} {blocks} of {self.unit} values of this rank {have} {faults}"

    def bytes(self, count: int) -> int:
        """Return the number of bytes of `count` encoded values."""
        return self.coder().bytes(count)

    @property
    def relative_size(self) -> float:
        """Bytes of many encoded values, divided by their bytes in float32."""
        many = 1 << 20
        return self.bytes(many) / (4 * many)


@dataclass(frozen=True)
class _Blocks(FlatCodec):
    """Base class of codecs with one scale for each block of values.

    Attributes:
        block: values that share a scale; a power of two from 32 to 16384.
    """

    block: int = 128
    code: ClassVar[str]

    def __post_init__(self) -> None:
        _check_integer(self, "block")
        self.coder()

    @property
    def unit(self) -> int:
        return self.block

    def coder(self, device: Device | None = None) -> Coder:
        return CoreCoder(self.code, self.block, device=device)


class Int8(_Blocks):
    """8 bits per value: integers from -127 to 127, times a scale per block.

    Attributes:
        block: values that share a scale; a power of two from 32 to 16384.
    """

    code = "int8"

    def near_coder(self) -> NearCoder:
        return ModuloCoder(8, self.block)


class Int4(_Blocks):
    """4 bits per value: integers from -7 to 7, times a scale per block.

    Attributes:
        block: values that share a scale; a power of two from 32 to 16384.
    """

    code = "int4"

    def near_coder(self) -> NearCoder:
        return ModuloCoder(4, self.block)


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
class TopK(FlatCodec):
    """The largest values of each chunk, with their positions.

    Source: Sarfi et al. 2025 (SparseLoCo): 64 values of 4096, with 2 bits each. The levels of 2 bits are the means of
    the larger and of the smaller magnitudes.

    Attributes:
        ratio: part of the values that is sent, in (0, 1].
        chunk: values among which the largest are chosen; a power of two from 32 to 16384.
        bits: bits of a value that is sent: 2, or 32 for its exact value.
        contributors: whether the mean of a value is over the ranks that have sent it, as in SparseLoCo, or over all
            ranks, with 0 for ranks that have not.
    """

    ratio: float = 1 / 64
    chunk: int = 4096
    bits: int = 2
    contributors: bool = False
    feedback = True
    gathered = True

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, (int, float)) or not 0 < self.ratio <= 1:
            raise UsageError(f"TopK(ratio={self.ratio!r}): must be above 0, and at most 1")
        _check_integer(self, "chunk")
        _check_integer(self, "bits")
        if self.bits not in (2, 32):
            raise UsageError(f"TopK(bits={self.bits}): must be 2 or 32")
        self.coder()

    @property
    def unit(self) -> int:
        return self.chunk

    def coder(self, device: Device | None = None) -> Coder:
        kept = max(1, round(self.ratio * self.chunk))
        return CoreCoder("top" if self.bits == 2 else "top_exact", self.chunk, kept, device)


class _Cast(FlatCodec):
    """Base class of casts."""

    dtype: ClassVar[str]
    in_core = False

    @property
    def unit(self) -> int:
        return 1

    def coder(self, device: Device | None = None) -> Coder:
        return CastCoder(self.dtype)

    def near_coder(self) -> NearCoder:
        return NearCastCoder(self.dtype)

    def not_finite(self, number: int, faults: str = "") -> str:
        values, are = ("values", "are") if number > 1 else ("value", "is")
        return f"{number} {values} of this rank {are} not finite in {self.dtype}"

    def bytes(self, count: int) -> int:
        return 2 * count


class Float16(_Cast):
    """16 bits per value: float16. Values beyond its range become infinite."""

    dtype = "float16"


class BFloat16(_Cast):
    """16 bits per value: bfloat16, which has the range of float32 and fewer digits."""

    dtype = "bfloat16"


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Low-rank factors of each gradient, with error feedback.

    A tensor of shape (n, ...) counts as a matrix of n rows. Ranks average the products of their matrices with a thin
    factor, and then the products of the transposed matrices with the orthonormalized result. So the mean is the mean
    over all ranks, projected on `rank` directions. Tensors with fewer than 2 dimensions, and tensors whose factors
    would be no smaller, are sent whole, in float32.

    Source: Vogels et al. 2019, Algorithms 1 and 2.

    Attributes:
        rank: columns of a factor, r: a matrix of n rows and m columns is sent as r(n + m) float32 values; at least 1.
    """

    rank: int = 4
    feedback = True

    def __post_init__(self) -> None:
        _check_integer(self, "rank")

    def factors(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the rows and columns of a tensor as a matrix; None: the tensor is sent whole."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        return (rows, columns) if self.rank * (rows + columns) < rows * columns else None

    def numbers(self, shapes: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Return the numbers of float32 values in the two averages, for tensors with these shapes."""
        found = [self.factors(shape) for shape in shapes]
        left = sum(one[0] for one in found if one is not None)
        right = sum(one[1] for one in found if one is not None)
        whole = sum(math.prod(shape) for shape, one in zip(shapes, found) if one is None)
        return self.rank * left, self.rank * right + whole


def _check_integer(codec: Codec, name: str) -> None:
    """Raise UsageError unless an attribute of a codec is an integer, at least 1."""
    value = getattr(codec, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{type(codec).__name__}({name}={value!r}): must be an integer, at least 1")


CODECS: dict[str, type[Codec]] = {
    "int8": Int8,
    "int4": Int4,
    "twobit": TwoBit,
    "sign": Sign,
    "topk": TopK,
    "float16": Float16,
    "bfloat16": BFloat16,
    "powersgd": PowerSGD,
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


def flat_codec_of(given: Codec | str | None, owner: str) -> FlatCodec | None:
    """Return the codec that a setting names, for values without shapes. Arguments and errors as in `codec_of`.

    Raises:
        UsageError: the codec needs the shapes of gradients.
    """
    codec = codec_of(given, owner)
    if codec is None or isinstance(codec, FlatCodec):
        return codec
    fitting = ", ".join(kind.__name__ for kind in CODECS.values() if issubclass(kind, FlatCodec))
    raise UsageError(
        f"{owner}={codec}: is for gradients that are averaged over all ranks in every step, with compression= of "
        f"DistributedOptimizer or hooks.Encoded. Use one of {fitting}"
    )


def _parsed(text: str, owner: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings in text such as "TopK(ratio=0.01)"."""
    name, bracket, _ = text.partition("(")
    if not bracket:
        return text, {}
    try:
        call = expression(text)
        if isinstance(call, ast.Call) and not call.args:
            return name, {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (ValueError, SyntaxError, TypeError):
        pass
    raise UsageError(f"{owner}={text!r}: must be a codec's name, or a name with settings such as Int8(block=64)")
