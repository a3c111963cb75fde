"""Which way operations on GPU memory go, and what is refused; on GPUs that are threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from pretended import devices

import sordino.torch as hvd
from sordino import sim
from sordino._core import Device, cuda_device, cuda_devices, sim_device
from sordino.errors import DeviceError, NotBuilt, OperationMismatch, UsageError
from sordino.runtime.context import current
from sordino.runtime.devices import common_device, core_device


def ways_of(work: Callable[[], object], size: int, gpus: list[Device], per_node: int = 0) -> dict[str, int]:
    """How many operations went which way, the same on all ranks."""

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
    """Where it has been told that it may, and is the only way."""
    gpus = devices("nccl", 2, monkeypatch)
    monkeypatch.setenv("SORDINO_GPU_ROUTE", route)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", told)
    assert ways_of(add, 2, [gpus[0]]) == {way: 3}


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
        current().pretended = sim_device(0) if hvd.rank() == 1 else None
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
    with pytest.raises((DeviceError, NotBuilt), match=r"GPU number 0|no CUDA"):
        cuda_device(0)


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
        return [parameter.detach() for parameter in parameters]

    (wanted,), (found,) = sim.run(1, train), sim.run(1, train, devices=[sim_device(0)])
    for one, other in zip(wanted, found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
