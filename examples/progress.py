"""Shows how a training goes: a bar for a person at a terminal, plain lines for a log file."""

from __future__ import annotations

import time
from types import TracebackType

from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn

from sordino.progress import bar

_SECONDS_PER_LINE = 2.0


class Reporter:
    """Rank 0's voice; on the other ranks every method does nothing."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if speaks:
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
        """One line (above the bar, if there is one)."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._speaks:
            print(text, flush=True)

    def begin(self, title: str, done: int, steps: int) -> None:
        """An epoch of `steps` steps begins, `done` of which were done before."""
        self._title, self._done, self._steps, self._images = title, done, steps, 0
        self._started = self._printed = time.monotonic()
        if self._bar:
            self._task = self._bar.add_task(title, total=steps, completed=done, detail="")

    def step(self, loss: float, batch: int) -> None:
        """One more step is done; `loss` is the mean over rank 0's rows, `batch` the global batch size."""
        self._done += 1
        self._images += batch
        now = time.monotonic()
        rate = self._images / max(now - self._started, 1e-9)
        detail = f"loss {loss:.3f}  {rate:,.0f} images/s"
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done, detail=detail)
        elif self._speaks and now - self._printed > _SECONDS_PER_LINE:
            self._printed = now
            print(f"{self._title}  step {self._done}/{self._steps}  {detail}", flush=True)

    def end(self) -> None:
        """The epoch is over."""
        if self._bar and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
