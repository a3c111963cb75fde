"""Progress of a training: a bar on a terminal, plain lines in a log file, JSON for programs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn

from sordino.progress import bar

_SECONDS_PER_LINE = 2.0


class Reporter:
    """Output of rank 0. On other ranks every method does nothing.

    Args:
        speaks: returns whether this is rank 0. Called each time, because ranks change their numbers when one is lost.
    """

    def __init__(self, speaks: Callable[[], bool]) -> None:
        self._speaks = speaks
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if speaks():
            self._bar = bar(MofNCompleteColumn(), TextColumn("{task.fields[detail]}"))

    def __enter__(self) -> Reporter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print one line (above the bar, if there is one)."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._speaks():
            print(text, flush=True)

    def begin(self, title: str, done: int, steps: int) -> None:
        """Begin an epoch of `steps` steps, of which `done` were taken before."""
        self._title, self._done, self._steps, self._images = title, done, steps, 0
        self._started = self._printed = time.monotonic()
        if self._bar:
            self._task = self._bar.add_task(title, total=steps, completed=done, detail="")

    def step(self, loss: float, batch: int) -> None:
        """Count a step. `loss` is the mean over rank 0's rows, `batch` the global batch size."""
        self._done += 1
        self._images += batch
        now = time.monotonic()
        rate = self._images / max(now - self._started, 1e-9)
        detail = f"loss {loss:.3f}  {rate:,.0f} images/s"
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done, detail=detail)
        elif now - self._printed > _SECONDS_PER_LINE and self._speaks():
            self._printed = now
            print(f"{self._title}  step {self._done}/{self._steps}  {detail}", flush=True)

    def end(self) -> None:
        """End the epoch."""
        if self._bar and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None


class StepLog:
    """Log with one line of JSON per step, appended to a file. A resumed training continues the log.

    A repeated step gets another line. A line that a kill has left incomplete stays in the file, and is not JSON.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._continues = False
        self._start = int(os.environ.get("SORDINO_RESTART", 0))

    def step(self, step: int, loss: float, ranks: int) -> None:
        """Log a step that `ranks` ranks have taken. Called by one of them."""
        line = {"step": step, "loss": loss, "ranks": ranks, "start": self._start, "time": time.time()}
        with open(self._path, "a", encoding="utf-8") as file:
            if not self._continues and not _ends_a_line(self._path):
                file.write("\n")
            file.write(json.dumps(line) + "\n")
        self._continues = True


def _ends_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
