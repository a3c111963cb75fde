"""Routes of operations on GPU memory, and refused operations; on simulated GPUs, which are threads."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pretended import devices, stand_in_for_nccl

import sordino.torch as hvd
from sordino import sim
from sordino._core import (
    Device,
    cuda_device,
    cuda_devices,
    cuda_obstacle,
    sim_capture,
    sim_device,
    sim_hold,
    sim_occupied,
    sim_stream,
)
from sordino.errors import DeviceError, NotBuilt, OperationMismatch, TransportError, UsageError
from sordino.runtime.context import current
from sordino.runtime.devices import common_device, core_device


def ways_of(work: Callable[[], object], size: int, gpus: list[Device], per_node: int = 0) -> dict[str, int]:
    """Return the number of operations per route, which must be the same on all ranks."""

    def count() -> dict[str, int]:
        work()
        return dict(current().world.gpu_operations)

    counts = sim.run(size, count, ranks_per_node=per_node, devices=gpus)
    assert all(one == counts[0] for one in counts)
    return counts[0]


def add() -> None:
    for count in (1, 1000, 100_000):
        value = torch.arange(count, dtype=torch.float32) + hvd.rank()
        wanted = torch.arange(count) * hvd.size() + hvd.size() * (hvd.size() - 1) / 2
        assert torch.equal(hvd.allreduce(value, op=hvd.Sum), wanted.float())


@pytest.mark.parametrize(
    ("kind", "size", "per_node", "way"),
    [
        ("direct", 1, 0, "ALONE"),
        ("direct", 3, 0, "IPC"),
        ("direct", 3, 1, "MPI"),
        ("direct", 4, 2, "MPI"),
        ("unshared", 3, 0, "STAGED"),
        ("staged", 3, 0, "STAGED"),
        ("staged", 3, 1, "STAGED"),
        ("nccl", 3, 0, "NCCL"),
        ("nccl", 3, 1, "NCCL"),
    ],
)
def test_the_way_of_an_allreduce(
    kind: str, size: int, per_node: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ways_of(add, size, devices(kind, size, monkeypatch), per_node) == {way: 3}


def test_two_ranks_on_one_gpu_do_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = devices("nccl", 2, monkeypatch)
    assert ways_of(add, 2, [gpus[0]]) == {"IPC": 3}


@pytest.mark.parametrize(("route", "told", "way"), [("nccl", "1", "NCCL"), ("nccl", "0", "STAGED"), ("", "1", "IPC")])
def test_two_ranks_on_one_gpu_by_nccl(route: str, told: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL is used if a setting allows it and it is the only route."""
    gpus = devices("nccl", 2, monkeypatch)
    monkeypatch.setenv("SORDINO_GPU_ROUTE", route)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", told)
    assert ways_of(add, 2, [gpus[0]]) == {way: 3}


def test_an_nccl_that_cannot_connect_ends_the_world_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = devices("nccl", 2, monkeypatch)
    nccl = ctypes.CDLL(str(stand_in_for_nccl()))
    nccl.fake_nccl_refuse(1)
    try:
        with pytest.raises(DeviceError, match="ncclCommInitRankConfig"):
            sim.run(2, add, devices=gpus)
    finally:
        nccl.fake_nccl_refuse(0)
    assert ways_of(add, 2, gpus) == {"NCCL": 3}


@pytest.mark.parametrize("route", ["nccl", "ipc", "mpi", "host"])
def test_the_environment_leaves_one_way(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = devices("nccl", 2, monkeypatch)
    monkeypatch.setenv("SORDINO_GPU_ROUTE", route)
    within = {"nccl": "NCCL", "ipc": "IPC"}.get(route, "STAGED")
    between = {"nccl": "NCCL", "mpi": "MPI"}.get(route, "STAGED")
    assert ways_of(add, 2, gpus) == {within: 3}
    assert ways_of(add, 2, gpus, per_node=1) == {between: 3}


def test_a_route_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_GPU_ROUTE", "pigeon")
    with pytest.raises(UsageError, match="SORDINO_GPU_ROUTE='pigeon'"):
        sim.run(1, add)


def test_a_gpu_against_a_cpu() -> None:
    def differ() -> str:
        current().host_device = sim_device(0) if hvd.rank() == 1 else None
        with pytest.raises(OperationMismatch, match="device: the CPU against a GPU") as found:
            hvd.allreduce(torch.ones(3), name="where")
        return str(found.value)

    assert "ranks 0 and 1" in sim.run(2, differ)[0] or "rank 0 and rank 1" in sim.run(2, differ)[0]


def test_tensors_of_one_operation_are_on_one_device() -> None:
    assert common_device([], "none") == torch.device("cpu")
    with pytest.raises(UsageError, match=r"the tensors are on several devices \(cpu, meta\)"):
        common_device([torch.ones(1), torch.ones(1, device="meta")], "the tensors")
    with pytest.raises(NotBuilt, match="meta"):
        core_device(torch.device("meta"))


@pytest.mark.skipif(cuda_devices() > 0, reason="a GPU is there")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises((DeviceError, NotBuilt)) as error:
        cuda_device(0)
    assert str(error.value) == cuda_obstacle()
    assert "no CUDA" in cuda_obstacle() or "finds no GPU" in cuda_obstacle() or "driver" in cuda_obstacle()


def own_gpu() -> Device:
    """Return this rank's own simulated GPU; the rank computes on one of its queues."""
    gpu = sim_device(0)
    stream = sim_stream(gpu)
    gpu.current_stream = lambda: stream
    current().host_device = gpu
    return gpu


def finish(handle: int) -> torch.Tensor:
    """Return the result when this thread can read it."""
    while not hvd.poll(handle):
        pass
    return hvd.synchronize(handle)


def test_operations_are_refused_while_a_graph_is_captured() -> None:
    def work() -> None:
        gpu = own_gpu()
        assert gpu.current_stream is not None
        stream = gpu.current_stream()
        under_way = hvd.allreduce_async_(torch.ones(100), name="under way", op=hvd.Sum)
        sim_capture(stream, True)
        with pytest.raises(UsageError, match=r"allreduce\.refused' was submitted while a CUDA graph is being captured"):
            hvd.allreduce_async_(torch.ones(100), name="refused")
        with pytest.raises(UsageError, match="waited for while a CUDA graph is being captured"):
            hvd.synchronize(under_way)
        sim_capture(stream, False)
        assert finish(under_way).tolist() == [2.0] * 100  # it can be waited for later
        for name in ("refused", "under way"):  # the world stays usable, and both names are free
            assert finish(hvd.allreduce_async_(torch.ones(100), name=name, op=hvd.Sum)).tolist() == [2.0] * 100

    sim.run(2, work)


def test_memory_that_was_shared_is_freed_with_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = devices("direct", 3, monkeypatch)

    def work() -> None:
        add()
        value = hvd.shared_empty(5_000_000, device="cpu").fill_(1.0)
        assert float(hvd.allreduce_(value, op=hvd.Sum, name="arena").sum()) == 5e6 * hvd.size()

    for _ in range(2):
        sim.run(3, work, devices=gpus)
        gc.collect()
        assert sim_occupied(gpus[0]) == 0


def test_a_gpu_without_memory_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are in memory that is kept, and reused after the work of its earlier use."""
    devices("nccl", 2, monkeypatch)

    def work() -> None:
        for turn in range(60):
            mine = torch.full((1000 * (1 + turn % 3),), hvd.rank() + float(turn))
            gathered = hvd.allgather_async(mine)
            scattered = hvd.reducescatter_async(mine, op=hvd.Sum)
            both = torch.cat([torch.full_like(mine, rank + float(turn)) for rank in range(2)])
            assert torch.equal(hvd.synchronize(gathered), both)
            assert hvd.synchronize(scattered).tolist() == [1 + 2.0 * turn] * (len(mine) // 2)

    gpus = [sim_device(number, takes_nccl=True, pools=False) for number in range(2)]
    assert ways_of(work, 2, gpus) == {"NCCL": 120}
    assert 0 < sim_occupied(gpus[0]) < 500_000  # 1.2 MB if none were used again


def test_results_may_be_freed_after_their_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are freed on the queue of their process set. A simulated queue ends the process if it is used after it was
    dropped."""
    gpus = devices("nccl", 3, monkeypatch)
    contexts = []

    def work() -> None:
        contexts.append(current())  # keeps the operations that no rank waits for
        pair = hvd.add_process_set([0, 1])
        mine = torch.ones(6, 1000)
        for process_set in (pair, hvd.global_process_set)[hvd.rank() == 2 :]:
            for start in (hvd.allgather_async, hvd.alltoall_async, hvd.reducescatter_async):
                start(mine, process_set=process_set)
        while current().world.names_in_flight():
            time.sleep(0.001)
        assert hvd.remove_process_set(pair)

    sim.run(3, work, devices=gpus)
    assert sum(sim_occupied(gpu) for gpu in gpus) > 0
    contexts.clear()
    gc.collect()
    assert sum(sim_occupied(gpu) for gpu in gpus) == 0


def test_where_there_is_no_room_others_are_asked_and_then_it_is_said() -> None:
    gpu = sim_device(0, room=4 << 20)
    asked: list[bool] = []
    gpu.on_no_room(lambda: asked.append(True))

    def work() -> None:
        hvd.allgather(torch.ones(1000))
        assert not asked
        with pytest.raises(TransportError, match="no room for 8000000 bytes on simulated device 0"):
            hvd.allgather(torch.ones(2_000_000))
        assert asked == [True]

    sim.run(1, work, devices=[gpu])


def test_an_error_of_those_asked_for_room_is_the_reason() -> None:
    """torch.cuda.empty_cache() raises while a CUDA graph is being captured."""
    gpu = sim_device(0, room=4 << 20)

    def refuse() -> None:
        raise RuntimeError("captures are underway")

    gpu.on_no_room(refuse)

    def work() -> None:
        with pytest.raises(TransportError, match="could not be released: captures are underway"):
            hvd.allgather(torch.ones(2_000_000))

    sim.run(1, work, devices=[gpu])


@pytest.mark.parametrize("elsewhere", [True, False])
def test_what_a_gpu_still_reads_is_kept_when_another_stream_has_waited(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = devices("nccl", 2, monkeypatch)

    def work() -> None:
        gpu = current().host_device
        assert gpu is not None
        one, other = sim_stream(gpu), sim_stream(gpu)
        hvd.allreduce(torch.ones(3), name="first")
        gpu.current_stream = lambda: one
        go_on = sim_hold(one)
        memory = np.ones(1000, dtype=np.float32)  # kept: unlike GPU memory, it is not reused in the order of a stream
        owner = memory[:]
        alive = weakref.ref(owner)
        handle = hvd.allreduce_async_(torch.from_numpy(owner), name="crossing", op=hvd.Sum)
        del owner
        gpu.current_stream = lambda: other if elsewhere else one
        hvd.synchronize(handle)
        gc.collect()
        kept = alive() is not None
        go_on()
        assert kept is elsewhere  # on the same stream, work of the memory's next owner runs after the operation
        gpu.current_stream = None
        for turn in range(2):
            hvd.allreduce(torch.ones(3), name=f"later {turn}")
        assert memory.tolist() == [2.0] * 1000
        gc.collect()
        assert alive() is None  # these operations have released it

    sim.run(2, work, devices=gpus)


def test_arrays_that_are_no_tensors() -> None:
    def work() -> None:
        mine = np.full(5, hvd.rank() + 1.0)
        assert hvd.allreduce(mine, name="copy").tolist() == [1.5] * 5
        hvd.allreduce_(mine, name="in place")
        assert mine.tolist() == [1.5] * 5
        assert hvd.allgather(np.arange(2)).tolist() == [0, 1, 0, 1]
        with pytest.raises(UsageError, match="__dlpack__, not list"):
            hvd.allreduce([1.0])

    sim.run(2, work)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_on_a_device_is_lars(momentum: float, nesterov: bool) -> None:
    if nesterov and momentum == 0:
        return

    def train() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(shape, generator=generator) for shape in ((7, 3), (5,), (2, 3, 4, 4), (1,))]
        parameters = [torch.nn.Parameter(weight) for weight in weights]
        parameters[2].data = parameters[2].data.contiguous(memory_format=torch.channels_last)
        optimizer = hvd.LARS(parameters, lr=0.5, momentum=momentum, weight_decay=0.01, nesterov=nesterov)
        for _ in range(3):
            for parameter in parameters[:3]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
                if parameter.dim() == 4:
                    parameter.grad = parameter.grad.contiguous(memory_format=torch.channels_last)
            optimizer.step()
            for state in optimizer.state.values():  # as from a checkpoint of a model in another memory format
                state["momentum_buffer"] = state["momentum_buffer"].contiguous()
        return [parameter.detach() for parameter in parameters]

    (wanted,), (found,) = sim.run(1, train), sim.run(1, train, devices=[sim_device(0)])
    for one, other in zip(wanted, found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_graph_writes_to_gradients_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured backward pass runs no hooks, and writes to the addresses that gradients had at its capture."""
    gpus = devices("direct", 2, monkeypatch)

    def work() -> None:
        weight = torch.nn.Parameter(torch.zeros(1000))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
        weight.grad = torch.zeros_like(weight)
        address = weight.grad.data_ptr()
        for step in range(5):
            values = np.full(1000, (hvd.rank() + 1.0) * (step + 1), np.float32)
            ctypes.memmove(address, values.ctypes.data, values.nbytes)
            optimizer.step()
        assert weight.tolist() == [-1.5 * 15] * 1000

    sim.run(2, work, devices=gpus)
