"""Checks of `sordino doctor` for transports: MPI, UCX and shared memory, each tried with two ranks."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Literal

from sordino.cli import run
from sordino.cli.check import REBUILD, Check
from sordino.errors import NotBuilt
from sordino.launcher import jobs, mpi
from sordino.launcher.processes import Ended, StopSignals

_SMOKE = [sys.executable, "-m", "sordino.cli.smoke"]
_SMOKE_TIMEOUT_S = 30.0
_ABIS = {"openmpi": "Open MPI", "mpich": "MPICH"}
_UCX = "`pip install libucx-cu13` (without CUDA, too)"


def check_mpi_build(build: Mapping[str, Any]) -> Check:
    """Report the MPIs that the core was built for.

    mpirun needs one, and so does srun with PMI; `sordino run` on one machine and torchrun do not.
    """
    if not build["mpi"]:
        return Check(
            "MPI of the build",
            "ok",
            "none: mpirun and srun with PMI need one; torchrun and `sordino run` without --hosts do not",
        )
    built = [_mpi_version(one) for one in build["mpi"]["library"].split("; ")]
    return Check("MPI of the build", "ok", " and ".join(built))


def check_mpi_runtime(build: Mapping[str, Any], probe: Mapping[str, Any]) -> Check:
    """Check that the MPI found at run time has an ABI of the build, or that no MPI is installed."""
    name = "MPI at run time"
    if not build["mpi"]:
        return Check(name, "ok", "not looked for: the core was built without MPI")
    if not probe["ok"] and probe["absent"]:
        return Check(
            name,
            "ok",
            f"none, and one machine needs none. For mpirun and srun: {mpi.INSTALL}; Sordino need not be built again",
        )
    if not probe["ok"]:
        return Check(name, "fail", _first_line(probe["error"]), f"{mpi.INSTALL}; or {REBUILD}")
    found = f"{_mpi_version(probe['library'])}, of the {_ABIS[probe['abi']]} ABI"
    if ("Open MPI" in probe["library"]) != (probe["abi"] == "openmpi"):
        fix = "unset LD_PRELOAD if it names an MPI: its functions replace those of the MPI that was found"
        return Check(name, "fail", f"{found}: the library and the ABI do not match", fix)
    return Check(name, "ok", found)


def check_ucx(build: Mapping[str, Any], probe: Mapping[str, Any], mpi_is_there: bool) -> Check:
    """Check that UCX loads, or is not installed. Without it, ranks on several machines need MPI."""
    absent = not build["ucx"] or (not probe["library"] and probe["absent"])
    if absent:
        fix = _UCX if build["ucx"] else f"{_UCX}; then {REBUILD}"
        if mpi_is_there:
            return Check("UCX", "ok", f"none: machines are connected by MPI only; to add UCX: {fix}")
        return Check("UCX", "warn", "none, and no MPI: all ranks must be on one machine", fix)
    if not probe["library"]:
        return Check("UCX", "fail", _first_line(probe["error"]), f"{_UCX}, or build again: {REBUILD}")
    return Check("UCX", "ok", f"{probe['library']}; the core was built with {build['ucx']}")


def check_choice(there: Mapping[str, bool], environment: Mapping[str, str]) -> Check:
    """Report the transports that ranks use here. `there`: whether "mpi" and "ucx" can be used."""
    chosen = environment.get("SORDINO_TRANSPORT", "auto")
    if chosen != "auto":
        return Check("transport", "ok", f"{chosen} (from SORDINO_TRANSPORT)")
    ways = ", ".join(["shared memory on one machine", *["UCX on several"] * there["ucx"]])
    if there["mpi"]:
        ways = f"MPI if started by mpirun or by srun with PMI; otherwise {ways}"
    return Check("transport", "ok", ways)


def check_mpirun(build: Mapping[str, Any], wanted: bool) -> tuple[mpi.Launcher | None, Check]:
    """Check that mpirun runs; it may be missing unless `wanted`."""
    try:
        launcher = mpi.find_launcher(build, os.environ)
    except NotBuilt as error:
        status: Literal["ok", "fail"] = "fail" if wanted else "ok"
        return None, Check("mpirun", status, str(error).partition(";")[0], mpi.INSTALL if status == "fail" else "")
    return launcher, Check("mpirun", "ok", f"{launcher.version}, {launcher.path}")


def check_two_ranks(there: Mapping[str, bool], launcher: mpi.Launcher | None) -> list[Check]:
    """Check that two ranks start, meet and average, with each available transport."""
    checks = [check_locally("local", {}, "started by `sordino run`, in shared memory")]
    if there["ucx"]:
        apart = {"SORDINO_TRANSPORT": "ucx", "SORDINO_RANKS_PER_NODE": "1"}
        checks.append(check_locally("ucx", apart, "started by `sordino run`, over UCX as between machines"))
    if launcher and there["mpi"]:
        checks.append(check_smoke(launcher))
    return checks


def check_locally(name: str, more: Mapping[str, str], how: str) -> Check:
    """Check that two ranks of `sordino run` start, meet and average, with additional environment variables."""
    job = mpi.Job(ranks=2, command=_SMOKE)
    environment = {**run.job_environment(), "SORDINO_TRANSPORT": "local", **more}
    with tempfile.TemporaryFile() as output, jobs.job_folder() as place, StopSignals() as stop:
        ended = jobs.start_locally(job, environment, place, False, stop, _SMOKE_TIMEOUT_S, output)
        output.seek(0)
        words = [f"{variable}={value}" for variable, value in more.items()]
        return _judged(f"two ranks, {name}", ended, output.read(), how, [*words, "sordino run -np 2"])


def check_smoke(launcher: mpi.Launcher) -> Check:
    """Check that two ranks of mpirun start, meet and average."""
    job = mpi.Job(ranks=2, command=_SMOKE)
    with tempfile.TemporaryFile() as output:
        with jobs.place_for(launcher, job) as place, StopSignals() as stop:
            environment = run.job_environment()
            ended = jobs.start(launcher, job, environment, place, stop, _SMOKE_TIMEOUT_S, output)
        output.seek(0)
        said = output.read()
    return _judged("two ranks, mpi", ended, said, "started by mpirun", ["sordino run --launcher mpi -np 2"])


def _judged(name: str, ended: Ended, output: bytes, how: str, words: list[str]) -> Check:
    said = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip("- \r")]
    if ended.status == 0 and "ranks=2 right" in said:
        return Check(name, "ok", f"{how}: averaged a tensor correctly")
    whole = f"`{' '.join(words)} -- python -m sordino.cli.smoke`"
    if ended.status == 124:
        return Check(name, "fail", f"no answer within {_SMOKE_TIMEOUT_S:.0f} s", f"try {whole}")
    # The last line of a traceback has the error; mpirun's own lines follow it.
    telling = [line for line in said if re.match(r"[\w.]+(Error|Lost|Timeout|Mismatch|NotBuilt)\b", line)] or said
    found = f"exit status {ended.status}: {telling[0] if telling else 'no output'}"
    return Check(name, "fail", found, f"see the whole output with {whole}")


def _mpi_version(text: str) -> str:
    """Return a name such as `Open MPI 5.0.11` from the version text of mpicc or the library."""
    family = re.search(r"Open MPI|MVAPICH|Intel\(R\) MPI|Cray MPICH|MPICH", text)
    number = re.search(r"\d+(\.\d+)+", text)
    return f"{family[0]} {number[0]}" if family and number else _first_line(text)


def _first_line(text: str) -> str:
    """Return the first line of a text, because MPI's library version may have many."""
    return text.strip().splitlines()[0].strip(" \0") if text.strip() else "unknown"
