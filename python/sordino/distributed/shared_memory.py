"""Memory that the ranks of a node share, for buffers of FSDP2 and DistributedDataParallel.

Collectives read and write such memory in place. Other memory passes through slots (csrc/collectives/node_pipeline.h).

- `MemoryPool` allocates tensors in shared segments. It reuses the segment of a tensor that is freed.
- `SharedStorages` moves storages that torch has allocated, with all tensors that use them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import torch

from sordino._core import Arena, Layout, SharedMemory
from sordino.errors import TransportError, UsageError
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST
from sordino.runtime.dtypes import DTYPE_CODES

_LEAST = 32 * 1024  # bytes; the core does not use smaller tensors in place (kLeastInPlace)
_PAGE = 4096

_sharers = torch._C._storage_Use_Count


class MemoryPool:
    """Tensors in shared memory, for one process group.

    A segment becomes free when neither a tensor nor an operation in flight uses it. It then serves the next tensor of
    the same rounded size. While all segments together have more than twice the peak of the bytes in use, each call
    releases the free segments that were unused longest. Any thread may call the functions.

    Args:
        context: the context of this rank.
    """

    def __init__(self, context: Context) -> None:
        self._world = context.world
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._is_open = True
        self._free: list[tuple[int, Arena]] = []  # (bytes, segment), in the order of their return
        self._used: dict[weakref.ref[SharedMemory], tuple[int, Arena]] = {}
        # Memory of freed tensors, added without the lock: a tensor may be freed while this thread holds it.
        self._returned: deque[weakref.ref[SharedMemory]] = deque()
        self._used_bytes = self._most_bytes = 0

    @property
    def segments(self) -> tuple[int, int]:
        """Number of segments in use, and number of free segments."""
        with self._lock:
            self._take_returned()
            return len(self._used), len(self._free)

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-d tensor with undefined values. It is in ordinary memory if it has less than 32 KiB.

        Raises:
            UsageError: the process group is destroyed, or this process is a forked child.
            TransportError: the machine has no shared memory left.
        """
        if os.getpid() != self._process:
            raise UsageError("allocate_tensor: this process was forked after init_process_group(), so it is not a rank")
        if count * dtype.itemsize < _LEAST:
            return torch.empty(count, dtype=dtype, device=HOST)
        size = _rounded(count * dtype.itemsize)
        with self._lock:
            if not self._is_open:
                raise UsageError("allocate_tensor: the process group is destroyed")
            self._take_returned()
            arena = self._take_free(size)
            if arena is None:
                arena = Arena(self._world, Layout([("shared", DTYPE_CODES[torch.uint8], (size,))], size))
            memory = arena.memory  # a new object, which lives as long as the tensor's storage
            self._used[weakref.ref(memory, self._returned.append)] = size, arena
            self._used_bytes += size
            self._most_bytes = max(self._most_bytes, self._used_bytes)
        return torch.frombuffer(memoryview(memory), dtype=dtype, count=count)  # type: ignore[arg-type]

    def close(self) -> None:
        """Release the free segments; tensors keep theirs. Do nothing in a forked child, where the lock may be held."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._is_open = False
            self._take_returned()
            self._free.clear()
            self._used.clear()

    def _take_free(self, size: int) -> Arena | None:
        for index in range(len(self._free) - 1, -1, -1):
            if self._free[index][0] == size:
                return self._free.pop(index)[1]
        return None

    def _take_returned(self) -> None:
        while self._returned:
            found = self._used.pop(self._returned.popleft())
            self._used_bytes -= found[0]
            self._free.append(found)
        excess = self._used_bytes + sum(size for size, _ in self._free) - 2 * self._most_bytes
        while excess > 0:
            excess -= self._free.pop(0)[0]


def _rounded(size: int) -> int:
    """Round a number of bytes up, by at most an eighth, so that tensors of similar sizes use the same segments."""
    step = max(_PAGE, 1 << (size.bit_length() - 4))
    return -(-size // step) * step


@dataclass(eq=False)
class _Moved:
    """A storage that was moved.

    Attributes:
        storage: the storage, which must live longer than `memory`.
        memory: registration of the storage's memory with the core; None: no tensor uses the storage any more.
    """

    storage: torch.UntypedStorage
    memory: SharedMemory | None


class SharedStorages:
    """Storages that torch has allocated, and that were moved to shared memory.

    A storage moves together with all tensors that use it. The move uses the function with which torch passes tensors
    to other processes. The memory is in /dev/shm.

    Args:
        context: the context of this rank.
    """

    def __init__(self, context: Context) -> None:
        self._world = context.world
        self._moved: list[_Moved] = []

    @property
    def count(self) -> int:
        """Number of moved storages that a tensor still uses."""
        self.release_unused()
        return len(self._moved)

    def move(self, tensor: torch.Tensor) -> None:
        """Move the storage of a CPU tensor, unless it already is in shared memory. No operation in flight may use it.

        Raises:
            TransportError: /dev/shm is full.
        """
        storage = tensor.untyped_storage()
        if self._world.in_shared_memory(storage.data_ptr(), storage.nbytes()):
            return
        self.release_unused()
        try:
            file, size = storage._share_fd_cpu_()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise TransportError(
                f"SharedBuckets: no room for a bucket of {storage.nbytes()} bytes in /dev/shm ({error}). Make /dev/shm "
                "larger (docker run --shm-size=...), or do not register this hook"
            ) from error
        self._moved.append(_Moved(storage, SharedMemory.adopt(self._world, storage.data_ptr(), size, file)))

    def release_unused(self) -> None:
        """Release the storages that no tensor uses any more. Operations in flight hold their tensors."""
        for one in self._moved:
            if _sharers(one.storage._cdata) <= 1:
                one.memory = None
        self._moved = [one for one in self._moved if one.memory is not None]
