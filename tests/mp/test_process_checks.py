"""The checks with ranks as processes, under a real mpirun and under `sordino run`. There is one job for each launcher
and number of ranks; its ranks run the checks of all its worlds, one after the other. The job of two ranks of `sordino
run` has real processes, as users' jobs do; the other jobs are forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from checks.commands import SORDINO
from checks.registry import Check, compare
from checks.worlds import PROCESSES, World
from selection import pairs_of

from sordino._core import build_info

DRIVER = Path(__file__).resolve().parents[1] / "checks" / "driver.py"
JOB_TIMEOUT_S = 1600  # with all checks of `--tier all`; ends a broken job

Reports = tuple[list[dict[str, dict]], str]


class Jobs:
    """Jobs by launcher and number of ranks. Each starts at its first test, with the checks that this run of pytest has
    selected."""

    def __init__(self, session: pytest.Session, folder: Path) -> None:
        self.folder = folder
        self.wanted: dict[tuple[str, int], list[tuple[World, str]]] = {}
        self.done: dict[tuple[str, int], Reports] = {}
        for item in session.items:
            if item.path == Path(__file__) and hasattr(item, "callspec"):
                world, check = item.callspec.params["world"], item.callspec.params["check"]
                self.wanted.setdefault((world.launcher, world.ranks), []).append((world, check.name))

    def reports(self, launcher: str, ranks: int) -> Reports:
        """Return the entries of each rank, by world and check, and the job's output."""
        if (launcher, ranks) not in self.done:
            self.done[launcher, ranks] = self.run(launcher, ranks)
        return self.done[launcher, ranks]

    def run(self, launcher: str, ranks: int) -> Reports:
        folder = self.folder / f"{launcher}{ranks}"
        folder.mkdir()
        orders = [
            {"name": f"{world} {check}", "check": check, "environment": world.environment, "gpu": world.gpu}
            for world, check in self.wanted[launcher, ranks]
        ]
        (folder / "orders").write_text(json.dumps(orders))
        python = [sys.executable] if (launcher, ranks) == ("local", 2) else forked.python()
        words = [*SORDINO, "run", "--launcher", launcher, "-np", str(ranks), "--"]
        with open(folder / "output", "w") as output:
            try:
                subprocess.run(
                    [*words, *python, str(DRIVER), str(folder), str(folder / "orders")],
                    env={"SORDINO_TIMEOUT_S": "60"} | os.environ,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=JOB_TIMEOUT_S,
                )
                ending = ""
            except subprocess.TimeoutExpired:
                ending = f"\nthe launcher was killed after {JOB_TIMEOUT_S} s"
        reports = []
        for rank in range(ranks):
            file = folder / f"{rank}.jsonl"
            lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            reports.append({line["name"]: line for line in lines})
        return reports, (folder / "output").read_text()[-4000:] + ending


@pytest.fixture(scope="session")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(request.session, tmp_path_factory.mktemp("jobs"))


@pytest.mark.timeout(JOB_TIMEOUT_S + 60)
@pytest.mark.parametrize(("world", "check"), pairs_of(PROCESSES))
def test_with_processes(jobs: Jobs, request: pytest.FixtureRequest, world: World, check: Check) -> None:
    if world.launcher == "mpi":
        request.getfixturevalue("launcher")  # skips without one
    if world.kind == "ucx" and not build_info()["ucx"]:
        pytest.skip("this build has no UCX")
    reports, output = jobs.reports(world.launcher, world.ranks)
    lines = [report.get(f"{world} {check.name}") for report in reports]
    errors = [f"rank {rank}: {line['error']}" for rank, line in enumerate(lines) if line and line["error"]]
    assert not errors, "\n".join(errors)
    missing = [rank for rank, line in enumerate(lines) if line is None or "log" not in line]
    latest = {rank: list(report)[-1] if report else "nothing" for rank, report in enumerate(reports)}
    assert not missing, f"ranks {missing} did not get there; the latest of each rank: {latest}\n{output}"
    compare([[tuple(entry) for entry in line["log"]] for line in lines if line and not line["helper"]])
