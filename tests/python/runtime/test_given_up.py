"""Memory of an operation that has ended because of a lost rank: the remaining ranks may still read and write it."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import torch

from sordino._core import Request, SimNetwork, World, sim_worlds
from sordino.errors import OperationMismatch, PeerLost
from sordino.runtime import opcode
from sordino.runtime.tensors import dtype_code


class Memory:
    """Owner of the memory of a request."""

    def __init__(self, count: int) -> None:
        self.tensor = torch.ones(count)

    def request(self, name: str) -> Request:
        """Return the request of an in-place all-reduce."""
        address = self.tensor.data_ptr()
        tensors = [(address, address, dtype_code(self.tensor), list(self.tensor.shape))]
        return Request(opcode.ALLREDUCE, name, tensors, keep=self)


def error_of(world: World, name: str, count: int) -> tuple[BaseException | None, weakref.ref[Memory]]:
    """Submit an operation. Return its error, and a weak reference to its memory after all other references are gone."""
    memory = Memory(count)
    handle = world.submit(memory.request(name))
    error: BaseException | None = None
    try:
        handle.wait()
    except (PeerLost, OperationMismatch) as raised:
        error = raised.with_traceback(None)
    held = weakref.ref(memory)
    del memory, handle
    gc.collect()
    return error, held


def test_memory_of_an_operation_that_was_given_up_stays() -> None:
    """Rank 2 is lost after it has announced the operation, which the others have begun by then."""
    network = SimNetwork([0, 1, 2])
    worlds = sim_worlds(network)
    for world in worlds:
        world.tolerate_losses()
    lost = worlds[2].submit(Memory(1 << 20).request("x"))
    time.sleep(0.3)
    network.stop(2)
    found: dict[int, tuple[BaseException | None, weakref.ref[Memory]]] = {}

    def run(rank: int) -> None:
        found[rank] = error_of(worlds[rank], "x", 1 << 20)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    network.kill(2)
    for thread in threads:
        thread.join(60)
    for rank in (0, 1):
        error, held = found[rank]
        assert isinstance(error, PeerLost) and error.ranks == (2,)
        assert held() is not None
    del lost


def test_memory_of_an_operation_that_shutdown_ends_stays() -> None:
    """Rank 1 is stopped during the operation, and may write to the memory when it continues."""
    network = SimNetwork([0, 1])
    worlds = sim_worlds(network)
    lost = worlds[1].submit(Memory(1 << 20).request("x"))
    time.sleep(0.3)  # it has announced the operation
    network.stop(1)
    memory = Memory(1 << 20)
    handle = worlds[0].submit(memory.request("x"))
    time.sleep(0.3)  # it has begun
    worlds[0].shutdown()
    held, is_over = weakref.ref(memory), handle.done()
    del memory, handle
    gc.collect()
    stays = held() is not None
    network.kill(1)  # before any assertion: the world of a stopped rank does not end
    del lost
    assert is_over and stays


def test_memory_of_an_operation_that_never_began_is_released() -> None:
    worlds = sim_worlds([0, 1])
    found: dict[int, tuple[BaseException | None, weakref.ref[Memory]]] = {}

    def run(rank: int) -> None:
        found[rank] = error_of(worlds[rank], "x", 10 + rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in (0, 1):
        error, held = found[rank]
        assert isinstance(error, OperationMismatch) and held() is None
