"""Jobs of `growing_worker.py`, which lose ranks and gain ranks, under the launcher of `sordino run`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import forked
from growing_worker import Plan
from pace import HANG_S

from sordino.launcher.local import LocalJob
from sordino.launcher.outcomes import Deadlines
from sordino.launcher.processes import Ended, StopSignals

WORKER = Path(__file__).with_name("growing_worker.py")
Parameters = list[float]


class Grown:
    """A job that has ended, and what its ranks have written."""

    def __init__(self, folder: Path, ended: Ended) -> None:
        self.folder, self.ended = folder, ended
        self.output = (folder / "output").read_text(errors="replace")

    def log(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"log.{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def parameters(self, when: str) -> dict[int, Parameters]:
        """Return the parameters "before" processes joined, "after" that, or at the "end", by rank."""
        found = {int(path.suffix[1:]): json.loads(path.read_text()) for path in self.folder.glob(f"{when}.*")}
        return dict(sorted(found.items()))


def clean_environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SORDINO_", "HOROVOD_"))}
    return {**clean, "OMP_NUM_THREADS": "1"}


def run_job(folder: Path, ranks: int, plan: Plan, respawns: int, **variables: str) -> Grown:
    python = forked.python() if plan.device == "cpu" else [sys.executable]
    return run_words(
        folder, ranks, [*python, str(WORKER), str(folder), json.dumps(asdict(plan))], respawns, **variables
    )


def run_words(folder: Path, ranks: int, words: list[str], respawns: int, **variables: str) -> Grown:
    """Run a job of another command to its end."""
    (folder / "job").mkdir()
    environment = {**clean_environment(), "SORDINO_ON_PEER_LOST": "continue", **variables}
    with open(folder / "output", "wb") as output:
        job = LocalJob(ranks, words, environment, folder / "job", True, Deadlines(), output, respawns)
        ended = job.run(StopSignals(), HANG_S)
    return Grown(folder, ended)
