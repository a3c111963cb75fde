"""The benchmarks of steps and ranks on a GPU: their models, their measurements, and reports from hand-made results."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_bench_gpu_kernels import MACHINE, times
from torch._C._autograd import DeviceType

import gpu_ranks
import gpu_step
import sordino.torch as hvd
from gpu import host_waits, models
from gpu import place as places
from sordino import sim
from sordino._core import sim_device
from sordino.bench.resnet import resnet50_shapes
from sordino.errors import NotBuilt
from sordino.report import Results
from sordino.timing import Participants

HOST = places.find("benchmarks", True)


# ---- gpu_step --------------------------------------------------------------------------------------------------------


def test_the_model_is_a_resnet50() -> None:
    model = models.ResNet50()
    assert [(name, tuple(one.shape)) for name, one in model.named_parameters()] == resnet50_shapes()
    assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    assert [tuple(one.shape) for one in models.Parameters().parameters()] == [shape for _, shape in resnet50_shapes()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_measured(ranks: int) -> None:
    """On threads that share a simulated GPU. With two ranks the wrapped step averages, and the bare one does not."""

    def work() -> Results:
        participants = Participants(hvd.rank(), hvd.size())
        (case,) = (case for case in models.cases(1, 32, 16) if case.name == "parameters")
        return gpu_step.measure(case, HOST, participants, False, 0.01, rounds=2)

    row = sim.run(ranks, work, devices=[sim_device(0)])[0]
    assert row["case"] == "parameters" and set(row["contestants"]) == {"bare", "sordino"}
    assert row["contestants"]["bare"]["wall"]["count"] == 2
    assert row["averaging"] == {"bare": ranks == 1, "sordino": True}
    assert ("IPC" in row["ways"]) == (ranks == 2), "one rank reduces nothing"
    waits = {"one wait": {"total": 1.0}}
    assert gpu_step.wrong([row], waits, ranks, True) == []
    row["averaging"]["sordino"] = False
    told = ["sordino step of parameters (set_to_none=False) does not average"] if ranks == 2 else []
    assert gpu_step.wrong([row], waits, ranks, True) == told
    assert gpu_step.wrong([], {"one wait": {"total": 0.0}}, ranks, True) == ["the profiler does not see the host wait"]


def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)


def test_waits_are_counted_within_steps() -> None:
    events = [
        event(host_waits.STEP, 10, 20),
        event(host_waits.STEP, 30, 40),
        event(host_waits.STEP, 15, 60, DeviceType.CUDA),
        event("cudaStreamSynchronize", 11, 12),
        event("cudaStreamSynchronize", 35, 39),
        event("cudaEventSynchronize", 31, 32),
        event("cudaDeviceSynchronize", 50, 51),  # the profiler's own
        event("cudaLaunchKernel", 12, 13),
    ]
    assert host_waits.within(events, 2) == {
        "cudaStreamSynchronize": 1.0,
        "cudaEventSynchronize": 0.5,
        "cudaDeviceSynchronize": 0.0,
        "total": 1.5,
    }
    with pytest.raises(RuntimeError, match="2 of 3 steps"):
        host_waits.within(events, 3)


def test_the_profiler_sees_every_step() -> None:
    ran: list[int] = []
    assert host_waits.count(lambda: ran.append(1), HOST, steps=3)["total"] == 0
    assert len(ran) == 6


def step_row(case: str, percent: float) -> Results:
    both = {name: {"wall": times(0.1), "device": times(0.09)} for name in ("bare", "sordino")}
    found = {"wall": times(percent), "device": times(percent / 2)}
    averaging = {"bare": False, "sordino": True}
    row = {"case": case, "set_to_none": True, "contestants": both, "overhead": found, "averaging": averaging}
    return row | {"bytes": 102 << 20, "ways": ["IPC"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_report_of_steps(ranks: int) -> None:
    rows = [step_row("ResNet-50", 1.25), step_row("parameters", 30.0)]
    waits = {name: dict.fromkeys(host_waits.WAITS, count / 3) | {"total": count} for name, count in WAITS.items()}
    results = {
        "benchmark": "gpu_step",
        "name": f"gpu_step_np{ranks}",
        "machine": MACHINE,
        "device": "A GPU",
        "gpus": 1,
        "cuda": "CUDA 13.0",
        "ranks": ranks,
        "batch": 64,
        "rows": rows,
        "waits": waits,
        "targets": gpu_step.targets(rows, waits, ranks),
    }
    judged = [(one["value"], one["met"]) for one in results["targets"]]
    assert judged == [(1.25, True)] * (ranks == 1) + [(0.0, True), (1.5, False)]
    text = gpu_step.REPORTS["gpu_step"].markdown(results)
    assert text.startswith("# A step on a GPU\n") and "(CUDA 13.0)" in text
    assert ("where nothing is averaged" in text) == (ranks == 1)
    assert ("102 MiB of gradients are averaged in a step, by IPC. They take turns" in text) == (ranks == 2)
    assert "64 images" in text and "1.25 % (1.12 to 1.38)" in text
    assert "| Crossover |" in text.replace(" " * 2, " ")


WAITS = {"bare": 0.0, "AllReduce": 0.0, "Crossover": 1.5, "one wait": 1.0}


# ---- gpu_ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["", "host"])
def test_ranks_are_measured(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads that share a simulated GPU; the CPU's tensors stand for its memory."""
    monkeypatch.setenv("SORDINO_GPU_ROUTE", route)

    def work() -> Results:
        return gpu_ranks.measure(4096, HOST, Participants(hvd.rank(), hvd.size()), 0.02)

    assert sim.run(2, lambda: gpu_ranks.slices(HOST, Participants(hvd.rank(), 2), 4096))[0]["ratio"] > 0
    first, second = sim.run(2, work, devices=[sim_device(0)])
    assert set(first) == {"arena", "fresh", "gossip", "by hand"}
    for found in (first, second):
        assert all(one["right"] for one in found.values())
        assert [found[key]["ways"] for key in ("arena", "fresh", "gossip")] == [["STAGED" if route else "IPC"]] * 3


def rank_row(size: int, **medians: float) -> Results:
    found = {
        key.replace("_", " "): times(median) | {"right": key != "gossip", "ways": ["IPC"]}
        for key, median in medians.items()
    }
    return {"bytes": size, "routes": {"default": found}}


def test_report_of_ranks() -> None:
    rows = [
        rank_row(1 << 20, arena=1e-4, fresh=2e-4, gossip=1e-4, by_hand=1e-3),
        rank_row(25 << 20, arena=1e-3, fresh=2e-2, gossip=1e-3, by_hand=1e-2),
    ]
    results = {
        "benchmark": "gpu_ranks",
        "name": "gpu_ranks_np2",
        "machine": MACHINE,
        "device": "A GPU",
        "gpus": 1,
        "cuda": "CUDA 13.0",
        "ranks": 2,
        "rows": rows,
        "slices": {"bytes": 64 << 20, "alone": 1e-3, "together": 2.5e-3, "ratio": 2.5},
        "wrong": gpu_ranks.wrong(rows),
        "targets": gpu_ranks.targets(rows),
    }
    found = [(one["value"], one["met"]) for one in results["targets"]]
    assert found == [(10.0, True), (0.5, False), (10.0, True), (None, None), (None, None), (None, None)]
    text = gpu_ranks.REPORTS["gpu_ranks"].markdown(results)
    assert text.startswith("# Ranks that take turns on a GPU") and "2 ranks on one A GPU" in text
    assert "by slices of time" in text and "2.5 ms when all copy at once: 2.50 times as long" in text
    assert "**Wrong results: gossip at 1 MiB (default), gossip at 25 MiB (default).**" in text
    assert "1 ms (900 µs to 1.1 ms), 10.00×" in text and "not measured" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("benchmark", [gpu_step, gpu_ranks])
def test_without_a_gpu(benchmark) -> None:
    with pytest.raises(NotBuilt):
        benchmark.main(["--quick"])
