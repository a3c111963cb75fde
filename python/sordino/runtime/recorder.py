"""Recorder: writes the run record of one rank, step by step, if enabled (`init(record=...)`, SORDINO_RECORD).

All time, and all bytes sent, belong either to a step or to "besides": the time from the end of a step to the return of
the last call of Sordino that the script makes before its next gradients (an evaluation, a broadcast, a checkpoint). All
other time belongs to the step that follows.

A rank without a recorder at most checks for it in a step or a call. With a recorder, a step costs the core's counting
and a line in the rank's file. Lines become rarer in the course of a run, so that a record of any run stays small.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sordino import _core
from sordino.errors import PeerLost, Timeout, UsageError
from sordino.record.writing import begin_rank, jsonable, open_rank_file

if TYPE_CHECKING:
    from sordino.runtime.context import Context

_LINES = 1000  # after each 1000 lines, a line covers twice as many steps
_FIRST = 32  # number of steps at the beginning whose spans are kept ...
_LATER = 8  # ... and number of steps from each later power of two on, except the first
_EARLIER = ("SORDINO_RESTART", "TORCHELASTIC_RESTART_COUNT")  # number of this start of the job; second: torchrun's


def folder_of(record: str | os.PathLike[str] | None) -> str:
    """Return the folder for records from `init(record=...)` or else the environment; "" without a folder.

    Raises:
        UsageError: `record` is not a path.
    """
    if record is None:
        return _core.record_folder()
    if not isinstance(record, (str, os.PathLike)):
        raise UsageError(f"init(record={record!r}): must be the path of a folder")
    return os.fspath(record)


@dataclass
class _Sums:
    """Counts of some steps, or of the time besides them, that are not written yet.

    Attributes:
        times: number of steps or calls.
        seconds: their duration.
        exposed: seconds in which calls waited.
        busy: seconds in which an operation was in flight.
        sent: bytes sent, by receiving rank.
    """

    times: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    busy: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)

    def values(self) -> dict[str, Any]:
        """Return the values for a line."""
        return {
            "seconds": round(self.seconds, 7),
            "exposed": round(self.exposed, 7),
            "busy": round(self.busy, 7),
            "sent": dict(self.sent),
        }


class Recorder:
    """Recorder of one rank.

    Args:
        context: the context of the rank.
        folder: folder of the rank's file, which is made if needed.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, context: Context, folder: str) -> None:
        self._context = context
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._to_wall = time.time() - time.monotonic()  # offset of the core's times from wall time
        self.steps = 0
        self._lines = 0  # of kind "step"
        self._wrapped: list[dict[str, Any]] = []  # optimizers that were wrapped before this rank's first line
        self._open = _Sums()  # of steps that are not in a line yet
        self._besides, self._after = _Sums(), 0  # time besides steps, and the step before it
        # Set when the next step's own work has begun. Hooks of parameters refer to it, and may outlast this recorder.
        self._begun = threading.Event()
        self._since = self._now()  # everything before this time is counted
        self._spans: list[list[Any]] = []
        self._file = open_rank_file(folder, context.identity)
        self._joined = context.newcomer is None
        if self._joined:
            self._begin()

    def _begin(self) -> None:
        """Write the first lines of this rank, and begin to count. A newcomer does so after it has joined."""
        context = self._context
        begin_rank(
            self._file,
            context.identity,
            size=context.size,
            start=next((int(text) for name in _EARLIER if (text := os.environ.get(name, "")).isdecimal()), 0),
            node=context.world.nodes[context.rank],
            host=context.world.host(context.rank),
            pid=self._process,
            transport=context.world.transport,
            survives_losses=context.survives_losses,
            time=self._since,
        )
        for values in self._wrapped:
            self._file.write("optimizer", **values)
        self._attach()

    def _attach(self) -> None:
        """Begin to count in the current world."""
        self._worlds = [(self._context.world, list(map(str, self._context.identities)))]
        helpers = self._context.helpers
        if helpers is not None:  # the world with the helpers, where workers have other numbers
            place = {rank: str(place) for place, rank in enumerate(helpers.roles.workers)}
            world = helpers.context.world
            self._worlds.append((world, [place.get(rank, f"helper {rank}") for rank in range(world.size)]))
        self._keeps = self._wants_spans()
        for world, _ in self._worlds:
            world.open_ledger()
            world.keep_spans(self._keeps)
        self._last = self._counters()

    def _counters(self) -> tuple[float, float, Counter[str]]:
        """Return the exposed seconds, the busy seconds and the bytes sent by rank, over all worlds."""
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

    def _now(self) -> float:
        return time.monotonic() + self._to_wall

    def _count(self, sums: _Sums) -> None:
        """Add everything since the last call to these sums."""
        now, (exposed, busy, sent) = self._now(), self._counters()
        before_exposed, before_busy, before_sent = self._last
        sums.seconds += now - self._since
        sums.exposed += exposed - before_exposed
        sums.busy += busy - before_busy
        sums.sent += sent - before_sent  # a Counter drops values that are not positive
        self._since, self._last = now, (exposed, busy, sent)

    # ---- steps, and the time besides ----------------------------------------------------------------------------

    def begins(self) -> None:
        """Note that the work of a step has begun. Calls from now on belong to the step."""
        self._begun.set()

    def asked(self) -> None:
        """Note that a call for communication has returned. Counts it as besides if the script made it between steps."""
        if not self._joined:
            return
        if self._begun.is_set() or threading.get_ident() != self._thread or torch._C._current_graph_task_id() >= 0:
            return  # a call of the algorithm: in a step, in another thread or in a backward
        begin, kept = self._since, len(self._spans)
        self._count(self._besides)
        self._besides.times += 1
        self._after = self.steps
        del self._spans[kept:]  # these spans belong to no step
        if self._keeps and self._lines:  # time before the first step is not drawn
            if self._spans and self._spans[-1][0] == "besides":
                self._spans[-1][2] = round(self._since, 7)
            else:
                self._spans.append(["besides", round(begin, 7), round(self._since, 7), -1, 0, ""])

    # ---- lines -------------------------------------------------------------------------------------------------

    def wrapped(self, algorithm: str, settings: str, parameters: Sequence[torch.Tensor], optimizer: str) -> None:
        """Note that an optimizer was wrapped, which counts as besides.

        Args:
            algorithm: name of the algorithm.
            settings: name and options of the algorithm.
            parameters: parameters of the optimizer. A step begins at the latest with the gradient of the last of them.
            optimizer: class name of the optimizer.
        """
        self.asked()
        last = next((one for one in reversed(parameters) if one.requires_grad), None)
        if last is not None:
            begun = self._begun
            last.register_post_accumulate_grad_hook(lambda _: begun.set())
        values = {
            "time": time.time(),
            "algorithm": algorithm,
            "settings": settings,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "optimizer": optimizer,
        }
        if self._joined:
            self._file.write("optimizer", **values)
        else:
            self._wrapped.append(values)

    def step(self, noted: Mapping[str, Any]) -> None:
        """Note the end of a step.

        Args:
            noted: events of the algorithm (`Strategy.noted`).
        """
        self.steps += 1
        self._count(self._open)
        self._open.times += 1
        self._begun.clear()
        if self._keeps or noted or self._open.times >= 1 << (self._lines // _LINES):
            self._close_line()
        for kind, values in noted.items():
            self._file.write(kind, step=self.steps, time=time.time(), **jsonable(values))
        keeps = self._wants_spans()
        if keeps != self._keeps:
            self._keeps = keeps
            for world, _ in self._worlds:
                world.keep_spans(keeps)

    def _close_line(self) -> None:
        """Write lines for the time besides steps, and for the finished steps."""
        if self._besides.times or self._besides.sent:
            self._file.write("besides", step=self._after, calls=self._besides.times, time=round(self._since, 6),
                             **self._besides.values())  # fmt: skip
            self._besides = _Sums()
        if not self._open.times:
            return
        self._file.write(
            "step", step=self.steps, steps=self._open.times, time=round(self._since, 6), **self._open.values()
        )
        if self._spans or self._keeps:
            self._file.write("spans", step=self.steps, spans=self._spans)
        self._spans, self._open = [], _Sums()
        self._lines += 1

    def metrics(self, step: int | None, values: Mapping[str, Any]) -> None:
        """Write metrics of the user; see `sordino.torch.record`. Does nothing in a forked child, or before joining."""
        if os.getpid() != self._process or not self._joined:
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
        """Record a recovery, in which this rank continues in another world within the block."""
        if not self._joined:  # a rank was lost while this one joined
            yield
            return
        before = set(self._context.identities)
        with self._other_world("recovery") as line:
            yield
            line.update(lost=sorted(before.difference(self._context.identities)), why=why)

    @contextmanager
    def joining(self, steps: int) -> Iterator[None]:
        """Begin the record of this process, which joins a running job within the block.

        Args:
            steps: number of steps that the job has taken. The steps of this rank are counted from it.
        """
        self._begun.set()  # calls of the joining are not calls of the script
        yield
        self._begun.clear()
        self.steps = self._after = steps
        self._since, self._joined = self._now(), True
        self._begin()

    @contextmanager
    def growth(self) -> Iterator[None]:
        """Record that ranks join or leave. This rank continues in another world within the block."""
        before = set(self._context.identities)
        with self._other_world("growth") as line:
            yield
            now = set(self._context.identities)
            line.update(joined=sorted(now - before), left=sorted(before - now))

    @contextmanager
    def _other_world(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield a dict for further values of the line that is written at the end of the block."""
        values: dict[str, Any] = {}
        began = time.monotonic()
        in_step = self._begun.is_set()
        self._count(self._open if in_step else self._besides)
        self._besides.times += not in_step
        self._begun.set()  # calls of the recovery are not calls of the script
        yield values
        if not in_step:
            self._begun.clear()
        self._attach()
        self._file.write(
            kind,
            time=time.time(),
            step=self.steps,
            epoch=self._context.epoch,
            size=self._context.size,
            seconds=round(time.monotonic() - began, 6),
            **values,
        )

    def failed(self, error: BaseException) -> None:
        """Write the error that ends this rank."""
        ranks = list(error.ranks) if isinstance(error, PeerLost) else []
        ranks += list(error.missing) if isinstance(error, Timeout) else []
        identities = self._context.identities
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        named = [identities[rank] for rank in ranks if 0 <= rank < len(identities)]
        self._finish("error", error=type(error).__name__, text=text, ranks=named)

    def close(self) -> None:
        """Write that this rank has shut down. Idempotent."""
        self._finish("end")

    def _finish(self, kind: str, **values: Any) -> None:
        if os.getpid() != self._process:
            return
        if not self._joined:
            self._file.close()
            return
        self._count(self._besides)  # also of an unfinished step
        self._after = self.steps
        self._close_line()
        self._file.write(kind, time=time.time(), step=self.steps, **values)
        self._file.close()
        for world, _ in self._worlds:
            world.open_ledger(False)
