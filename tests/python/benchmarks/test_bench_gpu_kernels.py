"""The benchmark of the GPU kernels: its measurements on the host, and its report from hand-made results."""

from __future__ import annotations

import pytest
import torch

import gpu_kernels
from gpu import place as places
from gpu import resnet_calls
from gpu.place import Place, in_turn
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
RESNET = [
    {
        "kernel": "unchanged",
        "times": {"kernel": times(1e-4), "torch": times(2e-3), "copy": times(9e-5)},
        "ratio": 20.0,
        "copy_ratio": 0.9,
    }
]


def test_targets_are_for_large_tensors_and_the_worst_dtype() -> None:
    found = gpu_kernels.targets(ROWS, RESNET)
    assert [(one["value"], one["limit"], one["met"]) for one in found] == [
        (0.88, 0.9, False),
        (0.93, 0.9, True),
        (20.0, 3.0, True),
    ]
    assert "bfloat16" in found[0]["what"] and "64 MiB" in found[0]["what"]


def test_targets_of_codecs() -> None:
    rows = [row(kernel, "float32", 64 << 20, 0.6) for kernel in ("encode int8", "decode sign", "encode top")]
    found = gpu_kernels.targets(rows, [])
    assert [(one["what"].split(",")[0], one["limit"], one["met"]) for one in found] == [
        ("encode int8", 0.5, True),
        ("decode sign", 0.5, True),
    ]


def test_codecs_are_measured() -> None:
    """This runs on the host instead of a GPU."""
    host = places.find("gpu_kernels", True)
    rows = gpu_kernels.measure(host, 4096, 0.001, lambda kernel: "int4" in kernel or kernel == "encode top")
    moved = {one["kernel"]: one["moved"] for one in rows}
    assert moved == {"encode int4": 4096 + 8 * 68, "decode int4": 4096 + 8 * 68, "encode top": 4096 + 120}


def test_report() -> None:
    results = {
        "benchmark": "gpu_kernels",
        "name": "gpu_kernels",
        "machine": MACHINE,
        "device": "A GPU",
        "cache": 50 << 20,
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
    assert "twice the cache's 50 MiB" in text and "|             0.90 |" in text


def test_buffers_take_turns_beyond_the_cache() -> None:
    gpu = Place(torch.device("cpu"), "A GPU", 50 << 20)
    for size in (1 << 20, 16 << 20, 64 << 20, 256 << 20):
        assert (gpu.sets(size) - 1) * size >= 100 << 20, "the cache may still hold what a call touched before"
    assert gpu.sets(256 << 20) == 2
    called: list[int] = []
    run = in_turn([lambda number=number: called.append(number) for number in range(3)])
    for _ in range(7):
        run()
    assert called == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("dtype", gpu_kernels.DTYPES)
def test_operands_are_random_and_change_from_call_to_call(dtype: torch.dtype) -> None:
    host = places.find("gpu_kernels", True)
    sets = [gpu_kernels.Buffers(host, 4096, dtype) for _ in range(2)]
    for one in sets:
        assert all(operand.unique().numel() > 100 for operand in one.operands)
        assert torch.equal(one.operands[2], one.operands[3]) and not torch.equal(one.operands[0], one.operands[1])
    assert not torch.equal(sets[0].operands[0], sets[1].operands[0])
    assert {one.data_ptr() for one in sets[0].operands}.isdisjoint(one.data_ptr() for one in sets[1].operands)


def test_all_is_measured_beside_a_copy_and_pytorchs_operations() -> None:
    """This runs on the host instead of a GPU, with host kernels that a GPU has, too."""
    host = places.find("gpu_kernels", True)
    rows = gpu_kernels.measure(host, 4096, 0.001, lambda kernel: kernel in ("axpby", "flatten"))
    assert [(one["kernel"], one["dtype"], one["moved"]) for one in rows][:2] == [
        ("axpby", "float32", 3 * 4096),
        ("axpby", "bfloat16", 3 * 4096),
    ]
    assert rows[2]["kernel"] == "flatten" and all(set(one["times"]) == {"kernel", "copy"} for one in rows)
    (call,) = gpu_kernels.measure_resnet(host, 0.001, lambda kernel: kernel == "axpby", narrow=16)
    assert set(call["times"]) == {"kernel", "torch", "copy"}
    assert call["ratio"] == call["times"]["torch"]["median"] / call["times"]["kernel"]["median"]
    assert call["copy_ratio"] == call["times"]["copy"]["median"] / call["times"]["kernel"]["median"]


@pytest.mark.parametrize("kernel", ["reduce 2->1", "axpby", "flatten", "unflatten", "unchanged"])
def test_pytorchs_operations_do_what_the_kernel_does(kernel: str) -> None:
    host, shapes = places.find("gpu_kernels", True), [(3, 5), (7,), (2, 2)]
    torch.manual_seed(0)
    ours = resnet_calls.ResNet(host, shapes)
    torch.manual_seed(0)
    theirs = resnet_calls.ResNet(host, shapes)
    made = resnet_calls.THEIRS[kernel](theirs)
    call = resnet_calls.resnet_calls(host, ours)[kernel][2]
    call(ours)
    if kernel == "flatten":
        theirs.flat = made
    for one, other in ((ours.x, theirs.x), (ours.y, theirs.y), ([ours.flat], [theirs.flat])):
        for mine, wanted in zip(one, other):
            torch.testing.assert_close(mine, wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu() -> None:
    with pytest.raises(NotBuilt):
        gpu_kernels.main(["--quick"])
