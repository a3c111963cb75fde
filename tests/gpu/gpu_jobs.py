"""Start jobs of gpu_worker.py, one for each world, and read the files of their ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked
import pytest
import stand_in
from checks.commands import SORDINO
from checks.registry import compare
from pace import HANG_S, bound
from rank_seat import WAYS, all_checks

from sordino.errors import NotBuilt
from sordino.launcher import mpi

WORKER = Path(__file__).with_name("gpu_worker.py")
HEARS_WITHIN_S = 1.5  # on an idle machine; a GPU's first operations take a while
JOB_TIMEOUT_S = int(os.environ.get("SORDINO_TEST_JOB_S", "420"))


@dataclass(frozen=True)
class World:
    """A number of ranks, and the number of real GPUs that they use; 0 for a simulated one, or the stand-in for CUDA."""

    ranks: int
    gpus: int = 1
    stand_in: bool = False

    def __str__(self) -> str:
        if self.stand_in:
            return f"{self.ranks}-stand-in"
        return f"{self.ranks}-on{self.gpus}" if self.gpus else f"{self.ranks}-pretended"


def names(world: World, way: str = "", word: str = "") -> list[str]:
    """Return the names of a world's checks, for one route, that contain a word."""
    tail = f"@{way}" if way else ""
    return [
        one.name + tail
        for one in all_checks().values()
        if one.least <= world.ranks and (world.gpus or not one.cuda) and word in one.name
    ]


@dataclass
class Jobs:
    """The jobs of worlds; each runs at the first test of its world."""

    folder: Path
    wanted: dict[World, list[str]] = field(default_factory=dict)
    done: dict[World, tuple[list[list[dict[str, Any]]], str]] = field(default_factory=dict)

    @classmethod
    def of(cls, session: pytest.Session, path: str, folder: Path) -> Jobs:
        """Return jobs with the checks of a file that this run of pytest has selected."""
        jobs = cls(folder)
        for item in session.items:
            if item.path == Path(path) and "name" in getattr(item, "callspec", _Nothing).params:
                jobs.wanted.setdefault(item.callspec.params["world"], []).append(item.callspec.params["name"])
        return jobs

    def check(self, world: World, name: str) -> None:
        """Fail if a rank failed in the check or did not reach it, or if ranks had different results."""
        if world not in self.done:
            self.done[world] = self._run(world)
        reports, output = self.done[world]
        lines = [next((line for line in report if line.get("check") == name), None) for report in reports]
        errors = [f"rank {rank}: {line['error']}" for rank, line in enumerate(lines) if line and line["error"]]
        assert not errors, "\n".join(errors)
        missing = [rank for rank, line in enumerate(lines) if line is None]
        latest = {rank: report[-1] if report else "nothing" for rank, report in enumerate(reports)}
        assert not missing, f"ranks {missing} did not get there; the latest of each rank: {latest}\n{output}"
        left_out = [line["left_out"] for line in lines if line and line["left_out"]]
        if left_out:
            pytest.skip(left_out[0])
        compare([[tuple(entry) for entry in line["log"]] for line in lines if line])

    def _run(self, world: World) -> tuple[list[list[dict[str, Any]]], str]:
        folder = self.folder / str(world)
        folder.mkdir()
        (folder / "checks").write_text("\n".join(self.wanted[world]))
        ending = run(world, folder, [str(folder), str(folder / "checks")], JOB_TIMEOUT_S)
        reports = []
        for rank in range(world.ranks):
            file = folder / f"{rank}.jsonl"
            reports.append([json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [])
        return reports, (folder / "output").read_text(errors="replace")[-4000:] + ending


class _Nothing:
    params: dict[str, Any] = {}  # noqa: RUF012


def open_mpi() -> mpi.Launcher | None:
    """Return the mpirun that starts ranks, or None: then `sordino run` starts them, also with
    SORDINO_TEST_LAUNCHER=local."""
    if os.environ.get("SORDINO_TEST_LAUNCHER") == "local":
        return None
    try:
        launcher = mpi.find_launcher(mpi.build_info(), os.environ)
    except NotBuilt:
        return None
    return launcher if launcher.family == "openmpi" else None


def started(ranks: int, command: list[str], launcher: mpi.Launcher | None, outlive: bool) -> list[str]:
    """Return the words that start a command on some ranks. `outlive`: mpirun does not end the other ranks with a lost
    one."""
    if ranks == 1:
        return command
    extra: list[str] = []
    if launcher is not None and outlive:
        try:
            extra = mpi.fault_tolerance(launcher)
        except NotBuilt:
            launcher = None
    if launcher is None:
        return [*SORDINO, "run", "--launcher", "local", "-np", str(ranks), "--", *command]
    return mpi.command_line(launcher, mpi.Job(ranks, command, extra=extra))


def run(world: World, folder: Path, words: list[str], timeout: float, way: str = "", outlive: bool = False) -> str:
    """Run a job to its end with its output in a file. Return a note if it had to be killed.

    Ranks that use a GPU, or load the stand-in for CUDA, are real processes. Others are forks.
    """
    python = [sys.executable] if world.gpus or world.stand_in else forked.python()
    words = [*python, str(WORKER), *words, *([] if world.gpus else ["--pretend", "0"]), *["--cuda"] * world.stand_in]
    command = started(world.ranks, words, open_mpi(), outlive)
    environment = os.environ | {"SORDINO_TIMEOUT_S": "60"} | WAYS[way]
    if world.stand_in:
        environment |= stand_in.environment(folder)
    if world.gpus == 1:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with open(folder / "output", "w") as output:
        try:
            subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=timeout)
        except subprocess.TimeoutExpired:
            return f"\nthe job was killed after {timeout} s"
    return ""


def lose_a_rank(world: World, folder: Path, when: str, way: str = "") -> None:
    """Kill the last rank: all other ranks must hear of it, and all their later operations must fail in the same way."""
    ending = run(world, folder, [str(folder), "--lose", when], HANG_S, way, outlive=True)
    output = (folder / "output").read_text(errors="replace")[-3000:] + ending
    assert (folder / "struck").exists(), output
    struck = json.loads((folder / "struck").read_text())["at"]
    for rank in range(world.ranks - 1):
        path = folder / f"lost.{rank}"
        assert path.exists(), f"rank {rank} has not told what it heard\n{output}"
        report = json.loads(path.read_text())
        assert report["kind"] == "PeerLost" and report["ranks"] == [world.ranks - 1], report
        assert max(report["at"], report["done"]) - struck < bound(HEARS_WITHIN_S), (report, struck)
        assert report["later"] == ["PeerLost"] * 2 and report["computes"] == 20.0, report
    assert not ending, output
