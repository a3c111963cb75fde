"""The benchmarks of steps and ranks on a GPU: their models, their measuring, and reports from results by hand."""

from __future__ import annotations

import pytest
import torch
from test_bench_gpu_kernels import MACHINE, times

import gpu_ranks
import gpu_step
import sordino.torch as hvd
from sordino import sim
from sordino._core import sim_device
from sordino.bench.resnet import resnet50_shapes
from sordino.errors import NotBuilt
from sordino.report import Results
from sordino.timing import Participants

CPU = torch.device("cpu")


# ---- gpu_step --------------------------------------------------------------------------------------------------------


def test_the_model_is_a_resnet50() -> None:
    model = gpu_step.ResNet50()
    assert [(name, tuple(one.shape)) for name, one in model.named_parameters()] == resnet50_shapes()
    assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    assert [tuple(one.shape) for one in gpu_step.Parameters().parameters()] == [shape for _, shape in resnet50_shapes()]


def test_steps_are_measured() -> None:
    """On the CPU, where both clocks are one."""
    cases = {case.name: case for case in gpu_step.cases(1)}
    hvd.init()
    row = gpu_step.measure(cases["parameters"], CPU, False, 0.01, rounds=2)
    hvd.shutdown()
    assert row["case"] == "parameters" and set(row["contestants"]) == {"bare", "sordino"}
    assert row["contestants"]["bare"]["wall"]["count"] == 2
    assert row["overhead"]["wall"] == row["overhead"]["device"]


def step_row(case: str, percent: float) -> Results:
    both = {name: {"wall": times(0.1), "device": times(0.09)} for name in ("bare", "sordino")}
    found = {"wall": times(percent), "device": times(percent / 2)}
    return {"case": case, "set_to_none": True, "contestants": both, "overhead": found}


def test_report_of_steps() -> None:
    rows = [step_row("ResNet-50", 1.25), step_row("parameters", 30.0)]
    results = {
        "benchmark": "gpu_step",
        "name": "gpu_step",
        "machine": MACHINE,
        "device": "A GPU",
        "cuda": "CUDA 13.0",
        "batch": 64,
        "rows": rows,
        "targets": gpu_step.targets(rows),
    }
    assert [(one["value"], one["met"]) for one in results["targets"]] == [(1.25, True)]
    text = gpu_step.REPORTS["gpu_step"].markdown(results)
    assert text.startswith("# A step on one GPU") and "one A GPU (CUDA 13.0)" in text
    assert "64 images" in text and "1.25 % (1.12 to 1.38)" in text and "met" in text and "missed" not in text


# ---- gpu_ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["", "host"])
def test_ranks_are_measured(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads that share a simulated GPU, whose memory the CPU's tensors are taken to be."""
    monkeypatch.setenv("SORDINO_GPU_ROUTE", route)

    def work() -> Results:
        return gpu_ranks.measure(4096, CPU, Participants(hvd.rank(), hvd.size()), 0.02)

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
        "wrong": gpu_ranks.wrong(rows),
        "targets": gpu_ranks.targets(rows),
    }
    found = [(one["value"], one["met"]) for one in results["targets"]]
    assert found == [(10.0, True), (0.5, False), (10.0, True), (None, None), (None, None), (None, None)]
    text = gpu_ranks.REPORTS["gpu_ranks"].markdown(results)
    assert text.startswith("# Ranks that share a GPU") and "2 ranks on one A GPU" in text
    assert "**Wrong results: gossip at 1 MiB (default), gossip at 25 MiB (default).**" in text
    assert "1 ms (900 µs to 1.1 ms), 10.00×" in text and "not measured" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("benchmark", [gpu_step, gpu_ranks])
def test_without_a_gpu(benchmark) -> None:
    with pytest.raises(NotBuilt):
        benchmark.main(["--quick"])
