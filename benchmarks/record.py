"""Cost of a run record: steps of a small model with and without a record, in turns.

  sordino run -np 2 -- python benchmarks/record.py

Three contestants take turns of 64 steps each: no record, a record, and a record that keeps the spans of all steps. The
time of a turn is the slowest rank's, per step. The time of writing is measured directly, call by call on rank 0,
because the difference of whole steps is smaller than their noise.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sordino.torch as hvd
from sordino._core import build_info
from sordino.bench import command_line
from sordino.report import Results, machines, records
from sordino.runtime.context import Context, current
from sordino.runtime.recorder import Recorder
from sordino.timing import Participants, Watch, summarize
from timings.transports.recording import REPORTS

_STEPS = 64  # steps of a turn
_LAYERS, _WIDTH = 8, 64


class _Lines(Recorder):
    """A recorder that writes one line for every step, keeps no spans, and times itself."""

    def __init__(self, context: Context, folder: str) -> None:
        super().__init__(context, folder)
        self.calls: list[float] = []

    def step(self, noted: Mapping[str, Any]) -> None:
        begin = time.perf_counter()
        super().step(noted)
        self.calls.append(time.perf_counter() - begin)

    def _wants_spans(self) -> bool:
        self._lines = 0
        return False


class _Spans(_Lines):
    """A recorder that keeps the spans of all steps."""

    def _wants_spans(self) -> bool:
        return not super()._wants_spans()


def turn(optimizer: hvd.DistributedOptimizer, model: torch.nn.Module, recorder: Recorder | None) -> float:
    """Take a turn; return the slowest rank's seconds per step."""
    current().recorder = recorder
    x = torch.ones(8, _WIDTH)
    hvd.barrier()
    begin = time.perf_counter()
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    mine = (time.perf_counter() - begin) / _STEPS
    current().recorder = None
    slowest: float = hvd.allreduce(torch.tensor([mine], dtype=torch.float64), op=hvd.Max, name="turn").item()
    return slowest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on all ranks; rank 0 writes the results."""
    options = command_line.parser("record", __doc__, 30.0, "seconds in all")
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    hvd.init()
    mpi = build_info()["mpi"]
    machine = machines.machine(mpi["library"] if mpi else None)
    watch = Watch(Participants(hvd.rank(), hvd.size(), None, one_node=hvd.cross_size() == 1))
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    samples: dict[str, list[float]] = {"none": [], "lines": [], "spans": []}
    calls: dict[str, list[float]] = {"lines": [], "spans": []}
    with tempfile.TemporaryDirectory() as folder:
        turn(optimizer, model, None)
        end = time.monotonic() + (1.0 if chosen.quick else chosen.budget)
        going = True
        while going:
            for name, times in samples.items():
                place = str(Path(folder) / name)
                recorder = None if name == "none" else (_Lines if name == "lines" else _Spans)(current(), place)
                times.append(turn(optimizer, model, recorder))
                if recorder is not None:
                    recorder.close()
                    calls[name] += recorder.calls
            going = bool(hvd.broadcast_object(time.monotonic() < end, name="going"))
        size = sum(path.stat().st_size for path in (Path(folder) / "lines").glob("*.jsonl"))
    machine["others"] = watch.others()
    found = {name: summarize(np.array(times)) for name, times in samples.items()}
    results: Results = {
        "benchmark": "record",
        "name": "record",
        "machine": machine,
        "ranks": hvd.size(),
        "tensors": 2 * _LAYERS,
        "steps": _STEPS,
        "turns": len(samples["none"]),
        "contestants": found,
        "writing": {name: summarize(np.array(times)) for name, times in calls.items()},
        "bytes": size / _STEPS / len(samples["lines"]),
    }
    if hvd.rank() == 0:
        records.publish(results, command_line.results_folder(chosen), REPORTS)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
