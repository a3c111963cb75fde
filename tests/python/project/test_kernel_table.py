"""The table of expected properties of the CUDA kernels: the parser of the compiler's output, and the detection of
regressions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
SAID = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{name}' for '{target}'
ptxas info    : Function properties for {name}
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, {shared}4024 bytes cmem[0]
"""
FEW = "_ZN7sordino7kernels4cuda11elementwiseINS1_5BatchILi448EEENS1_6ReduceIfEEEEvT_T0_"
MANY = "_ZN7sordino7kernels4cuda11elementwiseINS1_5BatchILi4000EEENS1_6ReduceIfEEEEvT_T0_"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    specification = importlib.util.spec_from_file_location("kernel_table", ROOT / "tools" / "kernel_table.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["kernel_table"] = module  # dataclasses look for it there
    specification.loader.exec_module(module)
    return module


def said(name: str, target: str, registers: int, spilled: int = 0, shared: str = "") -> str:
    numbers = {"stack": spilled, "stores": spilled, "loads": spilled, "registers": registers, "shared": shared}
    return SAID.format(name=name, target=target, **numbers)


def test_a_kernel_has_the_most_of_its_instances(table: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / table.OBJECTS
    folder.mkdir(parents=True)
    (folder / "a.cu.o.ptxas").write_text(said(FEW, "sm_80", 40) + said(MANY, "sm_80", 44, spilled=8))
    (folder / "b.cu.o.ptxas").write_text(said(FEW, "sm_90", 38, shared="128 bytes smem, "))
    kernels = table.kernels_of(tmp_path)
    assert list(kernels) == ["elementwise<Reduce<float>>"]
    assert kernels["elementwise<Reduce<float>>"] == table.Kernel({"sm_80": 44, "sm_90": 38}, 16, 128)


def test_what_grows_is_found(table: ModuleType) -> None:
    kernels, launches = {"k<A>": ["40", "38", "8", "0", "64"]}, {"a step": ["3", "448"]}
    page = table.render(kernels, launches, "some nvcc")
    assert table.compare(page, kernels, launches, "some nvcc") == []

    worse = {"k<A>": ["40", "38", "9", "0", "64"]}
    assert table.compare(page, worse, launches, "another") == ["k<A>: 9 bytes spilled, and not 8"]
    assert table.compare(page, kernels, {"a step": ["4", "448"]}, "another") == ["a step: 4 launches, and not 3"]
    assert table.compare(page, kernels | {"k<B>": worse["k<A>"]}, launches, "another") == ["k<B> is not there"]

    other = {"k<A>": ["41", "38", "0", "0", "64"]}
    assert table.compare(page, other, launches, "another") == []
    assert table.compare(page, other, launches, "some nvcc") == ["registers or others differ"]
