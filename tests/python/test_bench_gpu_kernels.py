"""The report of the GPU kernels' benchmark, from results made by hand."""

from __future__ import annotations

import pytest
import torch

import gpu_kernels
from sordino.errors import NotBuilt
from sordino.report import Results

MACHINE = {
    "cpu": "a CPU",
    "cores": 8,
    "cores_per_rank": 8,
    "instruction_set": "avx2",
    "kernel": "Linux 6",
    "python": "3.11",
    "torch": "2.4",
    "sordino": "0.1.0",
    "mpi": "no MPI",
    "date": "2026-01-01",
    "others": 0.0,
}


def times(median: float) -> Results:
    return {"median": median, "q1": 0.9 * median, "q3": 1.1 * median, "least": 0.8 * median, "count": 20}


def row(kernel: str, dtype: str, size: int, ratio: float) -> Results:
    both = {"kernel": times(1e-4 / ratio), "copy": times(1e-4)}
    return {
        "kernel": kernel,
        "dtype": dtype,
        "bytes": size,
        "moved": 3 * size,
        "times": both,
        "ratio": ratio,
        "gbps": 3e4 * size * ratio / 1e9,
    }


ROWS = [
    row("axpby", "float32", 1 << 20, 0.5),
    row("axpby", "float32", 64 << 20, 0.97),
    row("axpby", "bfloat16", 64 << 20, 0.88),
    row("norm", "float32", 64 << 20, 0.93),
]
RESNET = [{"kernel": "unchanged", "times": {"kernel": times(1e-4), "torch": times(2e-3)}, "ratio": 20.0}]


def test_targets_are_for_large_tensors_and_the_worst_dtype() -> None:
    found = gpu_kernels.targets(ROWS, RESNET)
    assert [(one["value"], one["limit"], one["met"]) for one in found] == [
        (0.88, 0.9, False),
        (0.93, 0.9, True),
        (20.0, 3.0, True),
    ]
    assert "bfloat16" in found[0]["what"] and "64 MiB" in found[0]["what"]


def test_report() -> None:
    results = {
        "benchmark": "gpu_kernels",
        "name": "gpu_kernels",
        "machine": MACHINE,
        "device": "A GPU",
        "cuda": "CUDA 13.0",
        "rows": ROWS,
        "resnet": RESNET,
        "targets": gpu_kernels.targets(ROWS, RESNET),
    }
    text = gpu_kernels.REPORTS["gpu_kernels"].markdown(results)
    assert text.startswith("# Kernels on the GPU") and "one A GPU (CUDA 13.0)" in text
    assert "| axpby, float32  | 0.50 (16 GB/s) | 0.97 (1953 GB/s) |" in text
    assert "| axpby, bfloat16 |              – | 0.88 (1772 GB/s) |" in text
    assert "**missed**" in text and "20.00×" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu() -> None:
    with pytest.raises(NotBuilt):
        gpu_kernels.main(["--quick"])
