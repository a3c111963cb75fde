"""Collective operations of the benchmark: their buffers, known inputs and expected results. All data is float32.

The size of a row is in bytes, as in the OSU micro-benchmarks:

| operation                        | size                       | result on a rank |
| -------------------------------- | -------------------------- | ---------------- |
| allreduce, broadcast             | the rank's tensor          | in place         |
| allgather                        | the tensor that it passes  | size x ranks     |
| reducescatter                    | the tensor that it passes  | size / ranks     |
| alltoall                         | the tensor that it passes  | size             |
| sendrecv                         | the tensor that it sends   | size             |
| barrier                          | 0                          | none             |

In sendrecv the ranks 0 and 1, 2 and 3, ... send each other a tensor: first the even rank, then the odd one. So its time
is that of a round trip. The last of an odd number of ranks does nothing.

For reducescatter and alltoall a size is rounded down to a multiple of 4 B x ranks.
"""

from __future__ import annotations

import torch

OPERATIONS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "sendrecv", "barrier")
BYTES = 4  # of a float32
_DIVIDED = ("reducescatter", "alltoall")


def partner(rank: int, ranks: int) -> int:
    """Return the rank that exchanges messages with this one in sendrecv. A rank without a partner gets itself."""
    return rank ^ 1 if rank ^ 1 < ranks else rank


def elements(operation: str, size: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of elements of a rank's input and of its result; 0 for a result in place."""
    count = size // BYTES
    if operation in _DIVIDED:
        count -= count % ranks
    results = {"allgather": count * ranks, "reducescatter": count // ranks, "alltoall": count, "sendrecv": count}
    return count, results.get(operation, 0)


def job_bytes(operation: str, size: int, ranks: int) -> int:
    """Return the bytes of the inputs and results of all ranks."""
    return ranks * BYTES * sum(elements(operation, size, ranks))


def fill(operation: str, source: torch.Tensor, rank: int, ranks: int) -> None:
    """Write the input of the check, for which `is_right` knows the result."""
    if operation in _DIVIDED:
        for other, part in enumerate(source.chunk(ranks)):
            part.fill_(rank * ranks + other)
    else:
        source.fill_(rank + 1)


def is_right(operation: str, result: torch.Tensor, rank: int, ranks: int) -> bool:
    """Return whether a rank's result of the check is right."""
    if operation == "allreduce":
        expected = [ranks * (ranks + 1) // 2]
    elif operation == "broadcast":
        expected = [1]
    elif operation == "sendrecv":
        expected = [partner(rank, ranks) + 1]
    elif operation == "allgather":
        expected = [other + 1 for other in range(ranks)]
    elif operation == "alltoall":
        expected = [other * ranks + rank for other in range(ranks)]
    else:
        expected = [sum(other * ranks + rank for other in range(ranks))]
    parts = result.chunk(len(expected))
    return len(parts) == len(expected) and all(bool((part == value).all()) for part, value in zip(parts, expected))
