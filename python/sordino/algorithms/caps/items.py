"""Items of parameter skipping, the units that are sent or skipped: tensors of an arena, or blocks, as a table."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sordino.runtime.dtypes import DTYPES
from sordino.runtime.exchange.flat_buffer import ParameterBuffer
from sordino.runtime.tensors import dtype_code


class Part(NamedTuple):
    """Contiguous bytes of an arena that are exchanged as one. `group` is the rank that serves them."""

    offset: int
    bytes: int
    dtype: int
    group: int = 0


@dataclass(frozen=True)
class Items:
    """Table of items, in the order of their offsets in the arena. Each column is int64 [items].

    Attributes:
        offsets: offset of each item in the arena, in bytes.
        bytes: length of each item, in bytes.
        dtypes: dtype code of each item, as in sordino.runtime.tensors.
        tensors: number of the arena's tensor to which each item belongs.
    """

    offsets: NDArray[np.int64]
    bytes: NDArray[np.int64]
    dtypes: NDArray[np.int64]
    tensors: NDArray[np.int64]

    @classmethod
    def of(cls, arena: ParameterBuffer, block_bytes: int | None) -> Items:
        """Return the tensors of an arena, cut into blocks of `block_bytes` unless that is None."""
        rows = [
            (offset, tensor.numel() * tensor.element_size(), dtype_code(tensor), index)
            for index, (offset, tensor) in enumerate(zip(arena.layout.offsets, arena.tensors))
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        whole = cls(*(np.ascontiguousarray(column) for column in table.T))
        return whole if block_bytes is None else whole.cut(block_bytes)[0]

    def cut(self, limit: int) -> tuple[Items, NDArray[np.int64]]:
        """Return items of up to `limit` bytes (a multiple of 64), and for each the number of its original item."""
        counts = np.maximum(-(-self.bytes // limit), 1)
        parents = np.repeat(np.arange(len(self)), counts)
        begins = (np.arange(len(parents)) - np.repeat(np.cumsum(counts) - counts, counts)) * limit
        lengths = np.minimum(self.bytes[parents] - begins, limit)
        return Items(self.offsets[parents] + begins, lengths, self.dtypes[parents], self.tensors[parents]), parents

    def __len__(self) -> int:
        return len(self.offsets)

    @classmethod
    def from_lists(cls, description: list[list[int]]) -> tuple[Items, int]:
        """Return the items from the result of `as_lists`, and the bytes of the arena."""
        *columns, (count,) = description
        return cls(*(np.array(column, dtype=np.int64) for column in columns)), count

    def as_lists(self, count: int) -> list[list[int]]:
        """Return the items as lists, for ranks without the arena. `count` is the bytes of the arena."""
        return [*(column.tolist() for column in astuple(self)), [count]]

    @property
    def elements(self) -> NDArray[np.int64]:
        """Number of elements of each item, int64 [items]."""
        widths = np.array([DTYPES[int(code)].itemsize for code in self.dtypes], dtype=np.int64)
        return self.bytes // np.maximum(widths, 1)

    def parts(self, chosen: NDArray[np.bool_], groups: NDArray[np.int64] | None = None) -> list[Part]:
        """Return the chosen items as parts, ordered by group. Adjacent items of one group and dtype become one part.

        Args:
            chosen: flags of the chosen items, bool [items].
            groups: the group of each item, int64 [items]; None: all are in group 0.
        """
        groups = np.zeros(len(self), np.int64) if groups is None else groups
        indices = np.flatnonzero(chosen & (self.bytes > 0))
        indices = indices[np.argsort(groups[indices], kind="stable")]
        parts: list[Part] = []
        for row in zip(*(column[indices].tolist() for column in (self.offsets, self.bytes, self.dtypes, groups))):
            one = Part(*row)
            last = parts[-1] if parts else None
            if last and last.offset + last.bytes == one.offset and last[2:] == one[2:]:
                parts[-1] = last._replace(bytes=last.bytes + one.bytes)
            else:
                parts.append(one)
        return parts
