"""Checks of `sordino doctor`. Each returns what it found and, if needed, the fix.

The compiled module and torch are examined in a child process. A library that crashes or hangs while it is loaded must
not affect the doctor, which is to report it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from sordino.cli.check import REBUILD, Check
from sordino.cli.check_transports import (
    check_choice,
    check_mpi_build,
    check_mpi_runtime,
    check_mpirun,
    check_two_ranks,
    check_ucx,
)
from sordino.launcher.probe import ask_python

_PROBE = """
import json, sys
answer = {}
try:
    import numpy
    answer["numpy"] = numpy.__version__
except Exception as error:
    answer["numpy_error"] = f"{type(error).__name__}: {error}"
try:
    import torch
    answer["torch"] = torch.__version__
    answer["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
except Exception as error:
    answer["torch_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(answer))
"""
_PROBE_CORE = """
import json
from sordino import _core
gpus = {"found": _core.cuda_devices(), "names": [], "obstacles": [], "nccl": "", "error": ""}
if gpus["found"]:
    import torch  # whose NCCL is the first choice
    from sordino.runtime.devices import find_nccl
    find_nccl()
    for index in range(gpus["found"]):
        try:
            gpus["names"].append(_core.cuda_device(index).name)
        except Exception as error:
            gpus["obstacles"].append(str(error))
elif _core.build_info()["cuda"]:
    gpus["obstacles"].append(_core.cuda_obstacle())
try:
    gpus["nccl"] = _core.nccl()
except Exception as error:
    gpus["error"] = str(error)
from sordino.rendezvous.starts import find_ucx
find_ucx()
answer = {"build": _core.build_info(), "mpi": _core.probe_mpi(), "ucx": _core.probe_ucx(), "gpus": gpus}
print(json.dumps(answer))
"""


def all_checks() -> list[Check]:
    """Run every check, the jobs of two ranks last. Takes some seconds, at most about two minutes."""
    packages, packages_error = ask_python(_PROBE)
    core, core_error = ask_python(_PROBE_CORE)
    build: Mapping[str, Any] = core.get("build", {})
    there = {"mpi": bool(core) and core["mpi"]["ok"], "ucx": bool(core) and bool(core["ucx"]["library"])}
    checks = [
        check_python(),
        check_package("torch", (2, 4), packages, packages_error, "pip install torch"),
        check_package("numpy", (1, 24), packages, packages_error, "pip install numpy"),
        check_core(build, core_error),
    ]
    if build:
        checks += [
            Check("CPU kernels", "ok", f"{build['cpu_level']} on {platform.machine()}"),
            check_mpi_build(build),
            check_mpi_runtime(build, core["mpi"]),
            check_ucx(build, core["ucx"], there["mpi"]),
            check_choice(there, os.environ),
        ]
    launcher, launcher_check = check_mpirun(build, there["mpi"])
    checks += [launcher_check, check_shared_memory(), check_cores(), check_memlock()]
    if build:
        checks.append(check_cuda(build, int(packages.get("gpus", 0)), core["gpus"]))
        if core["gpus"]["found"]:
            checks += [check_nccl(core["gpus"]), check_gpu_ways(core["gpus"], core["mpi"], os.environ)]
    checks.append(check_extras())
    if build:
        checks += check_two_ranks(there, launcher)
    return checks


EXTRAS = {
    "sklearn": ("scikit-learn", "examples, plan, simulate"),
    "matplotlib": ("matplotlib", "plots"),
    "simpy": ("simpy", "simulate"),
}
"""Packages that some commands need, by module: the name for pip, and the commands."""


def check_extras() -> Check:
    """Check packages that only some commands need."""
    missing = {package: users for module, (package, users) in EXTRAS.items() if find_spec(module) is None}
    if not missing:
        return Check("extras", "ok", ", ".join(package for package, _ in EXTRAS.values()))
    found = "; ".join(f"no {package} ({users})" for package, users in missing.items())
    return Check("extras", "warn", found, f"pip install {' '.join(missing)}")


def check_python() -> Check:
    """Report the version of Python. It is new enough, or this code would not run."""
    return Check("Python", "ok", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}")


def check_package(name: str, least: tuple[int, int], probe: Mapping[str, Any], error: str, fix: str) -> Check:
    """Check that a Python package can be imported and is new enough."""
    wanted = f"{least[0]}.{least[1]}"
    version = str(probe.get(name, ""))
    if not version:
        return Check(name, "fail", str(probe.get(f"{name}_error", error)), f"{fix} (version {wanted} or later)")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < least:
        return Check(name, "fail", f"{version}; Sordino needs {wanted} or later", f"{fix} --upgrade")
    return Check(name, "ok", version)


def check_core(build: Mapping[str, Any], error: str) -> Check:
    """Check that the compiled module can be imported."""
    if not build:
        return Check("core", "fail", f"sordino._core: {error}", REBUILD)
    return Check("core", "ok", f"{build['version']}, {build['compiler']}")


def check_shared_memory() -> Check:
    """Check that the ranks of a node can share memory in Sordino's way: memfd, opened through /proc."""
    try:
        descriptor = os.memfd_create("sordino-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, 1 << 20)
            os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR))
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        fix = "mount /proc, and run on Linux 3.17 or later; until then the ranks of a node use MPI, which is slower"
        return Check("shared memory", "warn", f"memfd_create or /proc/PID/fd does not work ({error})", fix)
    found = "memfd and /proc work"
    with contextlib.suppress(OSError):
        room = os.statvfs("/dev/shm")
        found += f"; /dev/shm has {room.f_bavail * room.f_frsize / 2**30:.1f} GiB free"
    return Check("shared memory", "ok", found)


def check_cores() -> Check:
    """Check the number of cores that this process may use."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} usable of {present}"
    if usable == 1:
        return Check("cores", "warn", found, "ranks on one core take turns; give the process more (taskset, cgroup)")
    return Check("cores", "ok", found)


def check_memlock() -> Check:
    """Check the limit of locked memory. Only InfiniBand and GPUs need locked memory."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "unlimited")
    found = f"at most {soft / 2**20:.0f} MiB"
    if os.path.isdir("/sys/class/infiniband"):
        return Check("locked memory", "warn", f"{found}, and there is InfiniBand", "ulimit -l unlimited")
    return Check("locked memory", "ok", f"{found} (enough: no InfiniBand here)")


def check_cuda(build: Mapping[str, Any], gpus: int, seen: Mapping[str, Any]) -> Check:
    """Check that the core has CUDA kernels if torch sees GPUs, and sees the same number of GPUs.

    Args:
        build: build information of the core; "cuda" is empty if it has no CUDA kernels.
        gpus: number of GPUs that torch sees.
        seen: GPUs of the core: the number "found", the "names" of usable ones, and the "obstacles" of others.
    """
    found = f"{build['cuda'] or 'not built'}; torch sees {gpus} GPU{'' if gpus == 1 else 's'}"
    if gpus and not build["cuda"]:
        return Check("CUDA", "warn", found, f"put nvcc on PATH (or set CUDACXX), then {REBUILD}")
    if build["cuda"] and (gpus or seen["found"]) and seen["obstacles"]:
        return Check("CUDA", "warn", f"{found}, the core can use {len(seen['names'])}", "; ".join(seen["obstacles"]))
    if seen["found"] != gpus and build["cuda"]:
        fix = "install the CUDA build of torch if torch sees no GPU (https://pytorch.org)"
        return Check("CUDA", "warn", f"{found}, the core sees {seen['found']}", fix)
    return Check("CUDA", "ok", ", ".join([found, *seen["names"]]))


def check_nccl(seen: Mapping[str, Any]) -> Check:
    """Check that NCCL, for ranks with one GPU each, can be used."""
    if seen["nccl"]:
        return Check("NCCL", "ok", seen["nccl"])
    return Check("NCCL", "warn", "none: GPUs use CUDA IPC within a node, and MPI otherwise", seen["error"])


def check_gpu_ways(seen: Mapping[str, Any], probe: Mapping[str, Any], environment: Mapping[str, str]) -> Check:
    """Report the routes of operations on GPU memory (csrc/engine/run_on_device.cc) and a setting that delays them."""
    chosen = environment.get("SORDINO_GPU_ROUTE", "")
    asked = environment.get("SORDINO_CUDA_AWARE_MPI", "")
    takes_cuda = asked == "1" if asked else bool(probe["takes_cuda"])
    ways = ["nccl (a GPU for each rank)"] * bool(seen["nccl"])
    ways += ["ipc (within a node)", *["mpi (CUDA-aware)"] * takes_cuda]
    if chosen:
        ways = [way for way in ways if way.startswith(chosen)]
    found = ", else ".join([*ways, "through the host"]) + (f" (SORDINO_GPU_ROUTE={chosen})" if chosen else "")
    if chosen in ("", "nccl", "ipc") and environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "") == "1":
        fix = (
            "unset CUDA_DEVICE_MAX_CONNECTIONS: with 1, the operations of one process set wait for those of another, "
            "which may wait for this rank; or use only one process set at a time"
        )
        return Check("GPU routes", "warn", f"{found}; CUDA_DEVICE_MAX_CONNECTIONS=1", fix)
    return Check("GPU routes", "ok", found)
