"""Statistics of parameter skipping: the unchanged and the skipped part of each tensor over time, and bytes sent.

A *point* summarizes the steps since the point before. It is made every `statistics_interval` steps, at the end of an
epoch, and when tensors change.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.algorithms.caps.items import Items
from sordino.errors import NotBuilt
from sordino.files import atomic_file


class Writer(Protocol):
    """The part of torch.utils.tensorboard.SummaryWriter that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Record a value for a step."""


class _Counted(Protocol):
    counts: torch.Tensor
    compared: torch.Tensor

    def standard_errors(self) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class Point:
    """Summary of consecutive steps. Lists have one entry per tensor: None if the tensor did not exist yet.

    Attributes:
        step: the last of the steps.
        steps: the number of steps taken with other ranks; if it is 0, lists are empty.
        threshold: the threshold after the last step, in percent.
        ratios: mean fraction of unchanged elements on this rank; 1 for a tensor without elements.
        errors: standard errors of the ratios, NaN if one element was sampled of several; None if no ratio is estimated.
        skipped: mean fraction of bytes that were not sent.
        bytes_sent: bytes of parameters that each worker contributed to averages, in the steps and by flush().
        bytes_unskipped: bytes that the steps would have sent with nothing skipped.
        metric: mean of the metric that workers reported at the end of an epoch; None if no epoch ends here.
    """

    step: int
    steps: int
    threshold: float
    ratios: list[float | None]
    errors: list[float | None] | None
    skipped: list[float | None]
    bytes_sent: int
    bytes_unskipped: int
    metric: float | None


def _of_json(value: Any) -> Any:
    """Return a value in which None replaces NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _of_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_of_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class CaPSStatistics:
    """Statistics of `CaPS` on this rank, as returned by `optimizer.statistics`.

    Attributes:
        names, bytes: name and bytes of each tensor, in the order of the lists in points.
        points: the points so far, oldest first.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._items: Items | None = None
        self._steps = 0  # steps since the last point
        self._flushed = 0  # bytes sent by flush() since the last point
        self._writer: Writer | None = None
        self.names: list[str] = []
        self.bytes: list[int] = []
        self.points: list[Point] = []

    def describe(self, names: list[str], items: Items, step: int) -> None:
        """Set the tensors and items that are counted after `step`. Reorders the lists of earlier points to match."""
        if self._steps > 0:
            self._close(step, None)
        place = {name: index for index, name in enumerate(self.names)}
        order = [place.get(name) for name in names]
        for number, point in enumerate(self.points):
            ratios, errors, skipped = (
                values and [None if index is None else values[index] for index in order]
                for values in (point.ratios, point.errors, point.skipped)
            )
            self.points[number] = replace(point, ratios=ratios or [], errors=errors, skipped=skipped or [])
        self.names, self._items = names, items
        self.bytes = self._by_tensor(items.bytes).astype(int).tolist()
        self._clear()

    def _by_tensor(self, values: NDArray[Any]) -> NDArray[np.float64]:
        assert self._items is not None
        sums = np.bincount(self._items.tensors, weights=values.astype(np.float64), minlength=len(self.names))
        return sums.astype(np.float64)

    def _clear(self) -> None:
        assert self._items is not None
        self._steps = 0
        self._threshold = 0.0
        self._ratios, self._skipped = np.zeros(len(self._items)), np.zeros(len(self._items))
        self._variances: NDArray[np.float64] | None = None

    def add(self, step: int, threshold: float, found: _Counted, skipped: torch.Tensor) -> None:
        """Record a step: the counts of the detector, and the items that were skipped."""
        self._steps += 1
        self._threshold = threshold
        compared = found.compared.numpy()
        self._ratios += np.where(compared > 0, found.counts.numpy() / np.maximum(compared, 1), 1.0)
        self._skipped += skipped.numpy()
        errors = found.standard_errors()
        if errors is not None:
            squares = errors.numpy() ** 2
            self._variances = squares if self._variances is None else self._variances + squares
        if step % self._interval == 0:
            self._close(step, None)

    def add_flush(self, sent: NDArray[np.bool_]) -> None:
        """Record the items that flush() averaged."""
        if self._items is not None:
            self._flushed += int(self._items.bytes[sent].sum())

    def end_epoch(self, step: int, threshold: float, metric: float) -> None:
        """Record the end of an epoch, and its metric."""
        if self._items is None:  # a single rank skips nothing
            self._add_point(Point(step, 0, threshold, [], None, [], 0, 0, metric))
            return
        self._threshold = threshold
        self._close(step, metric)

    def _close(self, step: int, metric: float | None) -> None:
        items, steps = self._items, max(self._steps, 1)
        assert items is not None
        elements, lengths = items.elements, items.bytes
        counts = np.maximum(self._by_tensor(elements), 1)
        empty = self._by_tensor(elements) == 0
        ratios = np.where(empty, 1.0, self._by_tensor(self._ratios / steps * elements) / counts)
        skipped = self._by_tensor(self._skipped / steps * lengths) / np.maximum(self.bytes, 1)
        errors = None
        if self._variances is not None:
            errors = np.sqrt(self._by_tensor(self._variances * elements**2)) / counts / steps
        point = Point(
            step,
            self._steps,
            self._threshold,
            ratios.tolist() if self._steps else [],
            None if errors is None else errors.tolist(),
            skipped.tolist() if self._steps else [],
            *self._open_bytes(),
            metric,
        )
        self._clear()
        self._flushed = 0
        self._add_point(point)

    def _add_point(self, point: Point) -> None:
        self.points.append(point)
        if self._writer is not None:
            self._write(point, self._writer)

    # ---- for users ---------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Bytes of parameters sent so far, including steps after the last point."""
        return sum(point.bytes_sent for point in self.points) + self._open_bytes()[0]

    @property
    def bytes_unskipped(self) -> int:
        """Bytes of parameters that the steps so far would have sent with nothing skipped."""
        return sum(point.bytes_unskipped for point in self.points) + self._open_bytes()[1]

    def _open_bytes(self) -> tuple[int, int]:
        """Return `bytes_sent` and `bytes_unskipped` since the last point."""
        if self._items is None:
            return 0, 0
        whole = int(self._items.bytes.sum()) * self._steps
        return whole - int((self._skipped * self._items.bytes).sum()) + self._flushed, whole

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values. Steps since the last point are included in the bytes only."""
        return {
            "tensors": [{"name": name, "bytes": count} for name, count in zip(self.names, self.bytes)],
            "items": 0 if self._items is None else len(self._items),
            "bytes_sent": self.bytes_sent,
            "bytes_unskipped": self.bytes_unskipped,
            "points": [_of_json(asdict(point)) for point in self.points],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `as_dict()` to a JSON file, atomically."""
        with atomic_file(path) as file:
            file.write(json.dumps(self.as_dict(), indent=1).encode() + b"\n")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw ratios, threshold and bytes over the steps into a PNG file.

        Raises:
            NotBuilt: matplotlib is not installed.
        """
        from sordino.report import pictures

        if not pictures.draw(pictures.skipping, self.as_dict(), Path(path)):
            raise NotBuilt("plots need matplotlib (pip install matplotlib)")

    def write_to(self, writer: Writer) -> None:
        """Write points to TensorBoard: the existing points now, and each later point when it is complete.

        Args:
            writer: a torch.utils.tensorboard.SummaryWriter.
        """
        self._writer = writer
        for point in self.points:
            self._write(point, writer)

    def _write(self, point: Point, writer: Writer) -> None:
        for ratio, values in (("unchanged", point.ratios), ("skipped", point.skipped)):
            for name, value in zip(self.names, values):
                if value is None:
                    continue
                writer.add_scalar(f"sordino/{ratio}/{name}", value, point.step)
        writer.add_scalar("sordino/threshold", point.threshold, point.step)
        if point.bytes_unskipped:
            writer.add_scalar("sordino/bytes sent", point.bytes_sent / point.steps, point.step)
        if point.metric is not None:
            writer.add_scalar("sordino/metric", point.metric, point.step)
