"""Duration of a transfer between two workers: latency plus bits over the rate of the slower end.

This is the model of wan-gossip-scheduling, section 5.2.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sordino.errors import UsageError

Floats = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int64]

_TICK = 2.0**-36  # seconds; sums of multiples of it are exact for 36 hours
LONGEST = 2.0**17  # seconds: the 36 hours above
SLOWEST_GBPS = 1e-9  # one bit per second


def exact(seconds: float) -> float:
    """Return the nearest multiple of 2^-36 s (15 ps).

    Sums and differences of such durations have no rounding errors. So an event that is planned for some time happens at
    exactly that time, however the time was summed up.
    """
    return round(seconds / _TICK) * _TICK


class Links:
    """Links of all workers.

    Args:
        gbps: rate at which each worker sends and receives, in 10^9 bits per second; may be infinite.
        latency: latency of every message, in seconds.

    Attributes:
        gbps: the rates, as an array [workers].
        latency: the latency, as an exact duration (see `exact`).
    """

    def __init__(self, gbps: Sequence[float] | Floats, latency: float) -> None:
        self.gbps: Floats = np.asarray(gbps, dtype=np.float64)
        self.latency = exact(latency)

    def __len__(self) -> int:
        return len(self.gbps)

    @classmethod
    def wide(cls, workers: int, wide: int, narrow_gbps: float, wide_gbps: float, latency: float) -> Links:
        """Return links: fast ones for the first `wide` workers, and slow ones for the remaining workers."""
        return cls(np.where(np.arange(workers) < wide, wide_gbps, narrow_gbps), latency)

    @classmethod
    def read(cls, path: str | os.PathLike[str], workers: int) -> Links:
        """Read a JSON file: {"gbps": [one number per worker], "latency_ms": number}. Infinity is a number.

        Raises:
            UsageError: the file is missing, has another form, or is for another number of workers.
        """
        form = (
            f'expected {{"gbps": [{workers} numbers from 1e-9], "latency_ms": a number from 0 to {LONGEST * 1e3:.0f}}}'
        )
        try:
            said = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"--links {path}: cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--links {path}: is not JSON ({error}); {form}") from error
        if not isinstance(said, dict) or set(said) != {"gbps", "latency_ms"} or not isinstance(said["gbps"], list):
            raise UsageError(f"--links {path}: {form}")
        gbps, latency = said["gbps"], said["latency_ms"]
        if len(gbps) != workers:
            raise UsageError(f"--links {path}: gbps has {len(gbps)} numbers for {workers} workers; {form}")
        if not all(_is_number(rate) and rate >= SLOWEST_GBPS for rate in gbps):
            raise UsageError(f"--links {path}: gbps: {form}")
        if not _is_number(latency) or not 0 <= latency <= LONGEST * 1e3:
            raise UsageError(f"--links {path}: latency_ms: {form}")
        return cls(gbps, latency / 1e3)

    def seconds(self, i: int, j: int, count: float) -> float:
        """Return the duration of a transfer of `count` bytes between workers i and j, in exact seconds."""
        return exact(self.latency + 8e-9 * count / min(float(self.gbps[i]), float(self.gbps[j])))

    def all_seconds(self, i: Ranks, j: Ranks, count: float | Floats) -> Floats:
        """Return `seconds` of many transfers, for arrays of equal length."""
        seconds = self.latency + 8e-9 * count / np.minimum(self.gbps[i], self.gbps[j])
        return np.asarray(np.rint(seconds / _TICK) * _TICK)


def _is_number(value: object) -> bool:
    """Return whether a value is a number that a float can represent, including infinity."""
    return (type(value) is float and not math.isnan(value)) or (type(value) is int and abs(value) < 1 << 1000)
