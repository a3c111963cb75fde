"""Every check under a real mpirun: one job for each world, whose ranks run all checks one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from checks.registry import Check, all_checks, compare

from sordino.cli import mpi

DRIVER = Path(__file__).resolve().parents[1] / "checks" / "driver.py"
JOB_TIMEOUT_S = 800


@dataclass(frozen=True)
class World:
    """One way to start a job. `whole`: all checks run there, not only those that depend on how bytes move. `gpu`: all
    tensors are on one GPU, a simulated one."""

    ranks: int
    variable: str = ""
    value: str = ""
    whole: bool = False
    gpu: bool = False

    def __str__(self) -> str:
        how = f"-{self.variable.removeprefix('SORDINO_').lower()}={self.value}" if self.variable else ""
        return f"{self.ranks}{how}" + "-gpu" * self.gpu


WORLDS = [
    World(2, whole=True),
    World(3, whole=True),
    World(4),
    World(5),
    World(3, "SORDINO_RANKS_PER_NODE", "1"),
    World(4, "SORDINO_RANKS_PER_NODE", "2"),
    World(3, "SORDINO_SHARED_MEMORY", "0"),
    World(3, gpu=True),
]
CASES = [
    pytest.param(world, check, id=f"{world}-{check.name}")
    for world in WORLDS
    for check in all_checks().values()
    if check.serves("mpi", world.ranks) and (world.whole or check.moves_bytes)
]


class Jobs:
    """Starts the job of a world at its first test, with those checks that this run of pytest wants of it."""

    def __init__(self, launcher: mpi.Launcher, session: pytest.Session, folder: Path) -> None:
        self.launcher, self.folder = launcher, folder
        self.wanted: dict[World, list[str]] = {}
        self.done: dict[World, tuple[list[list[dict]], str]] = {}
        for item in session.items:
            if item.path == Path(__file__) and hasattr(item, "callspec"):
                self.wanted.setdefault(item.callspec.params["world"], []).append(item.callspec.params["check"].name)

    def reports(self, world: World) -> tuple[list[list[dict]], str]:
        """The lines that each rank wrote, and the job's output."""
        if world not in self.done:
            self.done[world] = self.run(world)
        return self.done[world]

    def run(self, world: World) -> tuple[list[list[dict]], str]:
        folder = self.folder / str(world)
        folder.mkdir()
        (folder / "checks").write_text("\n".join(self.wanted[world]))
        command = [sys.executable, str(DRIVER), str(folder), str(folder / "checks"), *["0"] * world.gpu]
        variables = {"SORDINO_TIMEOUT_S": "60"} | ({world.variable: world.value} if world.variable else {})
        with open(folder / "output", "w") as output:
            try:
                subprocess.run(
                    mpi.command_line(self.launcher, mpi.Job(world.ranks, command)),
                    env=os.environ | variables,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=JOB_TIMEOUT_S,
                )
                ending = ""
            except subprocess.TimeoutExpired:
                ending = f"\nmpirun was killed after {JOB_TIMEOUT_S} s"
        reports = []
        for rank in range(world.ranks):
            file = folder / f"{rank}.jsonl"
            reports.append([json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [])
        return reports, (folder / "output").read_text()[-4000:] + ending


@pytest.fixture(scope="session")
def jobs(launcher: mpi.Launcher, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(launcher, request.session, tmp_path_factory.mktemp("jobs"))


@pytest.mark.timeout(JOB_TIMEOUT_S + 60)
@pytest.mark.parametrize(("world", "check"), CASES)
def test_under_mpirun(jobs: Jobs, world: World, check: Check) -> None:
    reports, output = jobs.reports(world)
    lines = [next((line for line in report if line.get("check") == check.name), None) for report in reports]
    errors = [f"rank {rank}: {line['error']}" for rank, line in enumerate(lines) if line and line["error"]]
    assert not errors, "\n".join(errors)
    missing = [rank for rank, line in enumerate(lines) if line is None]
    latest = {rank: report[-1] if report else "nothing" for rank, report in enumerate(reports)}
    assert not missing, f"ranks {missing} did not get there; the latest of each rank: {latest}\n{output}"
    compare([[tuple(entry) for entry in line["log"]] for line in lines if line and not line["helper"]])
