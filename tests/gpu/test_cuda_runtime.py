"""State of a process on a GPU besides its tensors: the memory left to others, and a thread's current device."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator

import pytest
import torch

import sordino.torch as hvd
from sordino._core import cuda_kernels
from sordino.errors import TransportError
from sordino.runtime.dtypes import DTYPE_CODES

pytestmark = pytest.mark.gpu


@pytest.fixture
def world() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def free_memory() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_shared_memory_comes_back_with_the_end_of_a_world() -> None:
    mebibytes = 256
    before = None
    for _ in range(3):
        hvd.init()
        shared = hvd.shared_empty(mebibytes << 18, device="cuda").fill_(1.0)
        assert hvd.is_shared(shared)
        assert float(hvd.allreduce_(shared, name="shared").mean()) == 1.0
        del shared
        hvd.shutdown()
        before = free_memory() if before is None else before
        assert before - free_memory() < mebibytes << 19


@pytest.mark.large
def test_what_torch_keeps_is_given_back_where_there_is_no_room(world: None) -> None:
    free = free_memory()
    cached = torch.empty(free // 10 * 8, dtype=torch.uint8, device="cuda")
    del cached
    shared = hvd.shared_empty(free // 10 * 5, dtype=torch.uint8, device="cuda")
    shared.fill_(3)
    assert int(shared[-1]) == 3
    del shared
    with pytest.raises(TransportError, match=r"no room for \d+ bytes on .*\(cuda:0\)"):
        hvd.shared_empty(free * 10, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("other", [False, True], ids=["none", "other"])
def test_a_thread_keeps_the_context_that_it_had(other: bool) -> None:
    """A thread keeps its context: none, as in a new thread, or the context of another GPU."""
    if other and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    driver = ctypes.CDLL("libcuda.so.1")
    values, found = torch.ones(100, device="cuda:0"), torch.zeros(1, dtype=torch.float64, device="cuda:0")
    torch.cuda.synchronize()
    kernels = cuda_kernels.CudaKernels(0)
    seen: list[int | None] = []

    def current() -> int | None:
        context = ctypes.c_void_p()
        assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
        return context.value

    def work() -> None:
        if other:
            torch.zeros(1, device="cuda:1")
            torch.cuda.set_device(1)
        seen.append(current())
        kernels.norms(DTYPE_CODES[torch.float32], [([values.data_ptr()], 100)], found.data_ptr())
        seen.append(current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert float(found) == 10.0
    assert len(seen) == 2 and seen[0] == seen[1] and (seen[0] is not None) is other
