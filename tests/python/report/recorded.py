"""Records of invented runs, with everything that a report can show, written by hand in the format of docs/report.md."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

ZERO = 1_700_000_000.0  # start of the runs
STEP = 0.05  # seconds


def write(folder: Path, algorithm: str = "AllReduce()", ranks: int = 4, steps: int = 200, skips: bool = False,
          ages: bool = False, faults: bool = False, seed: int = 1, parameters: int = 61_706) -> Path:  # fmt: skip
    """Write the record of a training; rank 1 is slow. Return its folder.

    With `faults` the last rank is killed halfway, while it writes a line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = {"kind": "job", "format": 1, "version": "0.1", "what": "training", "time": ZERO}
    job: list[dict[str, Any]] = [
        {**head, "command": ["python", "train.py"]},
        {"kind": "start", "number": 0, "time": ZERO},
        {"kind": "end", "number": 0, "time": ZERO + STEP * steps + 1, "status": 0, "why": ""},
    ]
    _write(folder / "job.jsonl", job)
    draw = random.Random(seed)
    for rank in range(ranks):
        dies = faults and rank == ranks - 1
        lines: list[dict[str, Any]] = [
            {"kind": "rank", "format": 1, "version": "0.1", "rank": rank, "size": ranks, "start": 0, "node": rank // 2,
             "host": f"node{rank // 2}", "transport": "local", "time": ZERO + 1},
            {"kind": "optimizer", "time": ZERO + 1, "algorithm": algorithm.partition("(")[0], "settings": algorithm,
             "parameters": parameters, "optimizer": "SGD"},
        ]  # fmt: skip
        for step in range(1, (steps // 2 if dies else steps) + 1):
            lines += _step(draw, rank, ranks, step, skips, ages, parameters)
            if faults and not dies and step == steps // 2 + 1:
                lines.append({"kind": "recovery", "time": ZERO + STEP * step, "step": step, "lost": [ranks - 1],
                              "epoch": 1, "size": ranks - 1, "seconds": 0.12,
                              "why": f"PeerLost: rank {ranks - 1} on node1 is gone"})  # fmt: skip
        if not dies:
            lines.append({"kind": "end", "time": ZERO + STEP * steps + 1, "step": steps})
        _write(folder / f"rank-{rank:05d}.jsonl", lines, torn='{"kind":"step","st' if dies else "")
    return folder


def _step(draw: random.Random, rank: int, ranks: int, step: int, skips: bool, ages: bool,
          parameters: int) -> list[dict[str, Any]]:  # fmt: skip
    time = ZERO + 1 + STEP * step
    late = 0.012 if rank != 1 else 0.001
    exposed, busy = late + 0.002 * draw.random(), 0.02 + 0.004 * draw.random()
    near, far = 5 * parameters // 2, 2 * parameters // 5
    peers = {str(peer): far if peer // 2 != rank // 2 else near for peer in range(ranks) if peer != rank}

    def line(kind: str, **values: Any) -> dict[str, Any]:
        return {"kind": kind, "step": step, "time": time, **values}

    loss = 2.3 * math.exp(-step / 60) + 0.1 * draw.random()
    lines = [
        line("step", steps=1, seconds=STEP, exposed=exposed, busy=busy, sent=peers),
        line("metrics", values={"loss": loss}),
    ]
    if step <= 32 or 64 <= step < 72 or 128 <= step < 136:
        begin, wait = time - STEP, time - 0.002 - late
        spans = [["wait", wait, time - 0.002, -1, 0, ""],
                 ["meet", wait, time - 0.004, 1, 0, "grads"] if rank != 1 else ["meet", wait, wait, 1, 0, "grads"],
                 ["move", time - 0.004, time - 0.002, -1, 246_824, "grads"]]  # fmt: skip
        if ages:
            spans.append(["pull", begin + 0.004, begin + 0.02, (rank + step) % ranks, 246_824, ""])
        lines.append(line("spans", spans=spans))
    if step % 10 == 0:  # an evaluation follows
        lines.append({**line("besides", calls=2, seconds=0.2, exposed=0.01, busy=0.01, sent=peers), "time": time + 0.2})
        lines.append(line("metrics", values={"test_accuracy": 0.98 - 0.9 * math.exp(-step / 40)}))
    if ages and step % 2 == 0:
        lines.append(line("ages", pulls=[[0.03 + 0.02 * draw.random(), draw.choice((0, 1, 2)), 0.016]]))
    if skips and step % 20 == 0:
        names = ["conv1.weight", "conv1.bias", "conv2.weight", "fc.weight"]
        share = [min(1.0, step / 200 * factor) for factor in (0.3, 1.0, 0.6, 1.4)]
        point = {"step": step, "steps": 20, "threshold": 60.0, "ratios": share, "errors": None, "metric": None,
                 "skipped": [0.9 * one for one in share], "bytes_sent": 4_000_000 - 15_000 * step,
                 "bytes_unskipped": 4_000_000}  # fmt: skip
        lines.append(line("skips", names=names, bytes=[600, 24, 10_000, 190_000], points=[point]))
    return lines


def _write(path: Path, lines: list[dict[str, Any]], torn: str = "") -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
