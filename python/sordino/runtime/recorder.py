"""Writes down what one rank does, step by step, where it was asked to (`init(record=...)`, SORDINO_RECORD).

A rank without a recorder looks once a step whether it has one. With one, a step costs what the core counts of it and a
line in the rank's file; lines grow rarer as a run grows longer, so that a record of any run stays small.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sordino import _core
from sordino.errors import PeerLost, Timeout, UsageError
from sordino.record.writing import jsonable, rank_file

if TYPE_CHECKING:
    from sordino.runtime.context import Context

_LINES = 1000  # after so many lines each one sums up twice as many steps
_FIRST = 32  # steps at the beginning whose spans are kept ...
_LATER = 8  # ... and so many from each later power of two on, but for this one
_EARLIER = "SORDINO_RESTART"


def folder_of(record: str | os.PathLike[str] | None) -> str:
    """Return where `init(record=...)`, or else the environment, has records written; "" for nowhere.

    Raises:
        UsageError: it is no path.
    """
    if record is None:
        return _core.record_folder()
    if not isinstance(record, (str, os.PathLike)):
        raise UsageError(f"init(record={record!r}): must be the path of a folder")
    return os.fspath(record)


class Recorder:
    """One rank's record.

    Args:
        context: of the rank.
        folder: where its file is, or is made.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, context: Context, folder: str) -> None:
        self._context = context
        self._process = os.getpid()
        self._to_wall = time.time() - time.monotonic()  # what the core's times lack
        self.steps = 0
        self._lines, self._open = 0, 0  # lines of steps; steps that no line tells of yet
        self._began = time.time()
        self._exposed = self._busy = 0.0
        self._sent: Counter[int] = Counter()
        self._spans: list[list[Any]] = []
        self._file = rank_file(
            folder,
            context.identity,
            size=context.size,
            start=int(os.environ.get(_EARLIER) or 0),
            node=context.world.nodes[context.rank],
            host=context.world.host(context.rank),
            pid=self._process,
            transport=context.world.transport,
            outlasts=context.outlasts,
            time=self._began,
        )
        self._attach()

    def _attach(self) -> None:
        """Begin to count in the world that there is."""
        world = self._context.world
        world.open_ledger()
        self._keeps = self._wants_spans()
        world.keep_spans(self._keeps)
        self._last = self._counters()

    def _counters(self) -> tuple[float, float, list[int]]:
        """Return seconds exposed, seconds in which something was under way, and bytes by rank, in this world so far."""
        world = self._context.world
        busy, sent, spans, _ = world.take_ledger()
        self._note_spans(spans)
        exposed = world.stats["waited_seconds"]
        if self._context.helpers is not None:
            exposed += self._context.helpers.context.world.stats["waited_seconds"]
        return exposed, busy, sent

    def _note_spans(self, spans: Iterable[tuple[str, float, float, int, int, str]]) -> None:
        identities = self._context.world.identities
        for what, begin, end, peer, count, name in spans:
            who = identities[peer] if 0 <= peer < len(identities) else -1
            self._spans.append([what, round(begin + self._to_wall, 7), round(end + self._to_wall, 7), who, count, name])

    def _wants_spans(self) -> bool:
        past = self.steps - (1 << max(self.steps.bit_length() - 1, 0))  # the last power of two
        return self.steps < _FIRST or (self.steps >= 2 * _FIRST and past < _LATER)

    # ---- what is written down ----------------------------------------------------------------------------------

    def wrapped(self, algorithm: str, settings: str, parameters: int, optimizer: str) -> None:
        """Note that an optimizer was wrapped: what was before the first is no part of a step."""
        if self.steps == 0:
            self._close_line("setup")
            self._lines = 0
        self._file.write(
            "optimizer",
            time=time.time(),
            algorithm=algorithm,
            settings=settings,
            parameters=parameters,
            optimizer=optimizer,
        )

    def step(self, noted: Mapping[str, Any]) -> None:
        """Note that a step is over.

        Args:
            noted: what the algorithm tells of it (`Strategy.noted`).
        """
        self.steps += 1
        self._open += 1
        if self._keeps or noted or self._open >= 1 << (self._lines // _LINES):
            self._close_line()
        for kind, values in noted.items():
            self._file.write(kind, step=self.steps, time=time.time(), **jsonable(values))
        keeps = self._wants_spans()
        if keeps != self._keeps:
            self._keeps = keeps
            self._context.world.keep_spans(keeps)

    def _take(self) -> None:
        """Add up what has been counted since the last time."""
        exposed, busy, sent = self._counters()
        before_exposed, before_busy, before_sent = self._last
        self._exposed += exposed - before_exposed
        self._busy += busy - before_busy
        for identity, now, before in zip(self._context.world.identities, sent, before_sent):
            if now > before:
                self._sent[identity] += now - before
        self._last = exposed, busy, sent

    def _close_line(self, kind: str = "step") -> None:
        now = time.time()
        self._take()
        self._file.write(
            kind,
            step=self.steps,
            steps=self._open,
            time=round(now, 6),
            seconds=round(now - self._began, 7),
            exposed=round(self._exposed, 7),
            busy=round(self._busy, 7),
            sent=dict(self._sent),
        )
        if self._spans and kind == "step":
            self._file.write("spans", step=self.steps, spans=self._spans)
        self._spans = []
        self._began, self._open = now, 0
        self._exposed = self._busy = 0.0
        self._sent = Counter()
        self._lines += 1

    def metrics(self, step: int | None, values: Mapping[str, Any]) -> None:
        """Note what the user has found; see `sordino.torch.record`."""
        if os.getpid() != self._process:
            return
        if step is not None:
            self.steps = step
        found = {}
        for name, value in values.items():
            try:
                found[name] = jsonable(float(value.detach() if isinstance(value, torch.Tensor) else value))
            except (TypeError, ValueError, RuntimeError) as error:
                raise UsageError(f"record({name}={value!r}): must be one number") from error
        self._file.write("metrics", step=self.steps, time=round(time.time(), 6), values=found)

    @contextmanager
    def recovery(self, why: str) -> Iterator[None]:
        """Surround what has this rank go on in another world, without some of the others."""
        before, began = set(self._context.world.identities), time.monotonic()
        self._take()
        yield
        self._attach()
        self._file.write(
            "recovery",
            time=time.time(),
            step=self.steps,
            lost=sorted(before.difference(self._context.world.identities)),
            epoch=self._context.epoch,
            size=self._context.size,
            seconds=round(time.monotonic() - began, 6),
            why=why,
        )

    def failed(self, error: BaseException) -> None:
        """Note the error that ends this rank."""
        ranks = list(error.ranks) if isinstance(error, PeerLost) else []
        ranks += list(error.missing) if isinstance(error, Timeout) else []
        identities = self._context.world.identities
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        named = [identities[rank] for rank in ranks if 0 <= rank < len(identities)]
        self._finish("error", error=type(error).__name__, text=text, ranks=named)

    def close(self) -> None:
        """Note that this rank has shut down. Idempotent."""
        self._finish("end")

    def _finish(self, kind: str, **values: Any) -> None:
        if os.getpid() != self._process:
            return
        if self._open:
            self._close_line()
        self._file.write(kind, time=time.time(), step=self.steps, **values)
        self._file.close()
