"""Writes down what one rank does, step by step, where it was asked to (`init(record=...)`, SORDINO_RECORD).

A rank without a recorder looks once a step whether it has one. With one, a step costs what the core counts of it and a
line in the rank's file; lines grow rarer as a run grows longer, so that a record of any run stays small.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
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
        self._sent: Counter[str] = Counter()
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
        self._worlds = [(self._context.world, list(map(str, self._context.world.identities)))]
        helpers = self._context.helpers
        if helpers is not None:  # a world of its own, where workers are known by other numbers
            place = {rank: str(place) for place, rank in enumerate(helpers.roles.workers)}
            world = helpers.context.world
            self._worlds.append((world, [place.get(rank, f"helper {rank}") for rank in range(world.size)]))
        self._keeps = self._wants_spans()
        for world, _ in self._worlds:
            world.open_ledger()
            world.keep_spans(self._keeps)
        self._last = self._counters()

    def _counters(self) -> tuple[float, float, Counter[str]]:
        """Return seconds exposed, seconds in which something was under way, and bytes by rank, in these worlds."""
        exposed = busy = 0.0
        sent: Counter[str] = Counter()
        for world, names in self._worlds:
            seconds, counts, spans, _ = world.take_ledger()
            exposed, busy = exposed + world.stats["waited_seconds"], busy + seconds
            for name, count in zip(names, counts):
                sent[name] += count
            for what, begin, end, peer, count, label in spans:
                who = int(names[peer]) if 0 <= peer < len(names) and names[peer].isdigit() else -1
                times = round(begin + self._to_wall, 7), round(end + self._to_wall, 7)
                self._spans.append([what, *times, who, count, label])
        return exposed, busy, sent

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
            for world, _ in self._worlds:
                world.keep_spans(keeps)

    def _take(self) -> None:
        """Add up what has been counted since the last time."""
        exposed, busy, sent = self._counters()
        before_exposed, before_busy, before_sent = self._last
        self._exposed += exposed - before_exposed
        self._busy += busy - before_busy
        self._sent += sent - before_sent  # a Counter keeps what is above 0
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
        if kind == "step" and (self._spans or self._keeps):
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
        for world, _ in self._worlds:
            world.open_ledger(False)
