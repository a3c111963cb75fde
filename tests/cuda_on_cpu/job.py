"""A process that runs checks on the stand-in for CUDA, for tests that each look at one of its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from stand_in import environment

if TYPE_CHECKING:
    from typing import Self

RUN_CHECKS = Path(__file__).with_name("run_checks.py")
MOST_RANKS = 5


@dataclass
class Job:
    """The process. It starts with the first test, runs the checks of all tests that pytest has selected, and goes on
    while tests look at results.

    Attributes:
        folder: folder for its files.
        wanted: "WORLD CHECK" of each test, in the order of the tests.
    """

    folder: Path
    wanted: list[str] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, session: pytest.Session, path: str, function: str, folder: Path) -> Self:
        """Return a job for the selected tests of a file's function, which has the parameters `world` and `check`."""
        items = [item for item in session.items if item.path == Path(path)]
        chosen = [item for item in items if getattr(item, "originalname", "") == function]
        params = [item.callspec.params for item in chosen]  # type: ignore[attr-defined]
        return cls(folder, [f"{each['world']} {each['check'].name}" for each in params])

    def check(self, name: str, seconds: float) -> None:
        """Wait for a check's result, and fail if it has failed."""
        limit = time.monotonic() + seconds
        while (outcome := self._outcome(name)) is None:
            if self._process is None:
                self._start()
            assert self._process is not None
            ended = self._process.poll() is not None and self._outcome(name) is None
            assert not ended, f"the process has ended with {self._process.returncode}\n{self._output()}"
            assert time.monotonic() < limit, f"no result within {seconds} s; the latest: {self._results()[-1:]}"
            time.sleep(0.02)
        assert outcome["error"] is None, f"{outcome['error']}\n{self._output()}"

    def end(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        (self.folder / "checks").write_text("\n".join(self.wanted))
        with open(self.folder / "output", "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(RUN_CHECKS), str(self.folder)],
                env=os.environ | environment(self.folder, devices=MOST_RANKS, queues=32),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _results(self) -> list[dict[str, str | None]]:
        path = self.folder / "results.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last one may be a part of a line
        return [json.loads(line) for line in lines]

    def _outcome(self, name: str) -> dict[str, str | None] | None:
        return next((one for one in self._results() if one.get("check") == name), None)

    def _output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")[-3000:]
