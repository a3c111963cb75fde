"""The build supports every CMake and every CUDA that it claims to support, also versions that this machine lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in import environment

ROOT = Path(__file__).resolve().parents[3]

# Like a run of CMake before 3.25.2 that finds an nvcc: the code that finds compilers is replaced.
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

# Headers of a toolkit and its driver, a stack of contexts. `cudaGetDriverEntryPointByVersion` exists since CUDA 12.5.
RUNTIME = """
#pragma once
#include <cstring>
#include <map>
#define CUDART_VERSION {version}
enum cudaError_t {{ cudaSuccess, cudaErrorUnknown }};
enum cudaDriverEntryPointQueryResult {{ cudaDriverEntryPointSuccess }};
enum cudaStreamCaptureMode {{ cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed = 2 }};
constexpr unsigned long long cudaEnableDefault = 0;
using cudaStream_t = struct Stream_*;
namespace fake {{
inline cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
}}
inline cudaError_t cudaGetLastError() {{ return cudaSuccess; }}
inline const char* cudaGetErrorString(cudaError_t) {{ return ""; }}
inline const char* cudaGetErrorName(cudaError_t) {{ return ""; }}
inline cudaError_t find(const char* name, void** found) {{
  static const std::map<std::string, void*> all{{{{"cuDeviceGet", reinterpret_cast<void*>(&fake::device)}},
                                                {{"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&fake::retain)}},
                                                {{"cuCtxPushCurrent", reinterpret_cast<void*>(&fake::push)}},
                                                {{"cuCtxPopCurrent", reinterpret_cast<void*>(&fake::pop)}}}};
  *found = all.at(name);
  return cudaSuccess;
}}
#if CUDART_VERSION >= 12050
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* = nullptr) {{
  return find(name, found);
}}
[[deprecated]]
#endif
inline cudaError_t cudaGetDriverEntryPoint(const char* name, void** found, unsigned long long,
                                           cudaDriverEntryPointQueryResult* = nullptr) {{
  return find(name, found);
}}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {{
  if (fake::stack.empty()) return cudaErrorUnknown;  // it would make a context on whatever device is the thread's
  std::swap(*mode, fake::mode);
  return cudaSuccess;
}}
"""
DRIVER = """
#pragma once
#include <string>
#include <utility>
#include <vector>
enum CUresult { CUDA_SUCCESS, CUDA_ERROR };
using CUdevice = int;
using CUcontext = struct Context_*;
namespace fake {
inline std::vector<CUcontext> stack;
inline int retained = 0;
inline CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(device + 100L); }
inline CUresult device(CUdevice* found, int ordinal) { return *found = ordinal, CUDA_SUCCESS; }
inline CUresult retain(CUcontext* found, CUdevice of) { return ++retained, *found = context_of(of), CUDA_SUCCESS; }
inline CUresult push(CUcontext one) { return stack.push_back(one), CUDA_SUCCESS; }
inline CUresult pop(CUcontext* one) { return *one = stack.back(), stack.pop_back(), CUDA_SUCCESS; }
}
"""
USES = """
#include "kernels/cuda/current.cuh"
#include <cstdlib>
using sordino::kernels::cuda::Current;
void require(bool holds, int which) { if (!holds) std::exit(which); }
int main() {
  for (const bool in_another : {false, true}) {
    if (in_another) fake::stack.push_back(fake::context_of(7));
    const auto before = fake::stack;
    {
      const Current one(2);
      require(fake::stack.back() == fake::context_of(2), 1);
      require(fake::mode == cudaStreamCaptureModeRelaxed, 2);
      {
        const Current other(3);
        require(fake::stack.back() == fake::context_of(3), 3);
      }
      require(fake::stack.back() == fake::context_of(2), 4);
      require(fake::mode == cudaStreamCaptureModeRelaxed, 5);
    }
    require(fake::stack == before, 6);
    require(fake::mode == cudaStreamCaptureModeGlobal, 7);
  }
  require(fake::retained == 2, 8);
}
"""


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
def test_a_device_is_current_for_a_while_and_leaves_the_thread_as_it_was(tmp_path: Path, version: int) -> None:
    (tmp_path / "cuda.h").write_text(DRIVER)
    (tmp_path / "cuda_runtime.h").write_text(RUNTIME.format(version=version))
    (tmp_path / "uses.cc").write_text(USES)
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    words = [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{tmp_path}", f"-I{ROOT}/csrc"]
    program = tmp_path / "uses"
    done = subprocess.run(
        [*words, "-o", str(program), str(tmp_path / "uses.cc")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert subprocess.run([str(program)], timeout=60).returncode == 0


def test_the_stand_in_is_used_beside_another_runtime(tmp_path: Path) -> None:
    """A PyTorch with CUDA loads NVIDIA's runtime, for all libraries of the process, before Sordino loads its own."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    variables = environment(tmp_path)
    (tmp_path / "other.c").write_text("int cudaGetDeviceCount(int* count) { *count = 0; return 35; }\n")  # no driver
    (tmp_path / "symbols.map").write_text("OTHER { *; };\n")
    options = ["-shared", "-fPIC", "-x", "c", "-Wl,--version-script=symbols.map", "other.c", "-o", "other.so"]
    subprocess.run([compiler, *options], check=True, cwd=tmp_path)
    program = "from sordino._core import cuda_device; cuda_device(0)"
    variables["LD_PRELOAD"] = str(tmp_path / "other.so")
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | variables)
