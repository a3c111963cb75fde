"""The build bears every CMake and every CUDA that it says it does, also those that this machine does not have."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# As a CMake before 3.25.2 goes through it, and an nvcc is found: what finds compilers is replaced.
FINDS = """
set(CMAKE_MODULE_PATH "{fakes}")
macro(enable_language)
  set(CMAKE_CUDA_COMPILER_VERSION {version})
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "{known}")
endmacro()
macro(find_package)
endmacro()
set(CMAKE_CUDA_COMPILER nvcc)
set(SORDINO_CUDA AUTO)
include("{root}/cmake/FindCudaCompiler.cmake")
message(STATUS "found ${{SORDINO_CUDA_FOUND}}, C++20 is '${{CMAKE_CUDA20_STANDARD_COMPILE_OPTION}}'")
"""

# What a toolkit's headers declare: `cudaGetDriverEntryPointByVersion` since 12.5.
RUNTIME = """
#pragma once
#define CUDART_VERSION {version}
enum cudaError_t {{ cudaSuccess }};
enum cudaDriverEntryPointQueryResult {{ cudaDriverEntryPointSuccess }};
constexpr unsigned long long cudaEnableDefault = 0;
using cudaStream_t = struct Stream_*;
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t);
const char* cudaGetErrorName(cudaError_t);
cudaError_t cudaGetDevice(int*);
cudaError_t cudaSetDevice(int);
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* = nullptr);
[[deprecated]]
#endif
cudaError_t cudaGetDriverEntryPoint(const char*, void**, unsigned long long,
                                    cudaDriverEntryPointQueryResult* = nullptr);
"""
DRIVER = "#pragma once\nenum CUresult { CUDA_SUCCESS };\nusing CUdevice = int;\n"


@pytest.mark.parametrize("known", ["", "-std=c++20"], ids=["unknown", "known"])
def test_an_old_cmake_is_told_what_cpp20_is_for_nvcc(tmp_path: Path, known: str) -> None:
    (tmp_path / "CheckLanguage.cmake").write_text("macro(check_language)\nendmacro()\n")
    script = tmp_path / "script.cmake"
    script.write_text(FINDS.format(fakes=tmp_path, root=ROOT, version="12.1.105", known=known))
    cmake = shutil.which("cmake")
    assert cmake is not None
    done = subprocess.run([cmake, "-P", str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "found TRUE, C++20 is '-std=c++20'" in done.stdout


@pytest.mark.parametrize("version", [12010, 12040, 12050, 13000])
def test_the_driver_is_asked_in_a_way_that_the_toolkit_has(tmp_path: Path, version: int) -> None:
    (tmp_path / "cuda.h").write_text(DRIVER)
    (tmp_path / "cuda_runtime.h").write_text(RUNTIME.format(version=version))
    (tmp_path / "uses.cc").write_text(
        '#include "kernels/cuda/current.cuh"\nbool used() { return sordino::kernels::cuda::has_context(0); }\n'
    )
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    words = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{tmp_path}", f"-I{ROOT}/csrc"]
    done = subprocess.run([*words, str(tmp_path / "uses.cc")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
