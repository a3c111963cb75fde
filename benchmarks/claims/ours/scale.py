"""Time and memory of the simulator with many workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from claims.claim import Claim, Found, Plan, Run
from claims.evidence import exact
from claims.papers import SORDINO
from sordino.errors import SordinoError
from sordino.report import Results

COUNTS = (1000, 10_000, 100_000)
STEPS = 32  # steps of each worker: two windows
SETTINGS = {"scheduled-pull": "overlap=scheduled", "crossover": "interval=16"}
_MOST_S, _MOST_GIB = 300.0, 2.0
_PER_RUN_S = 1200.0  # longest time of a process


def simulated(algorithm: str, workers: int, steps: int) -> Results:
    """Return the seconds, the peak resident bytes and the number of messages of a process of `sordino simulate`.

    Raises:
        SordinoError: the process failed.
    """
    words = ["--algorithm", algorithm, "--set", SETTINGS[algorithm], "--data", "none", "--workers", str(workers)]
    words += ["--steps", str(steps), "--processes", "1", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        path, said = Path(folder) / "found.json", Path(folder) / "said"
        begin = time.monotonic()
        with said.open("w") as file:
            # No other code of this process waits for children, so wait4 reports this child alone.
            command = [sys.executable, "-m", "sordino.cli", "simulate", *words, "--json", str(path)]
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
            status, used = _ended(child, begin + _PER_RUN_S)
        seconds = time.monotonic() - begin
        if status != 0:
            ended = f"sordino simulate {' '.join(words)} ended with status {status}"
            raise SordinoError(f"{ended}:\n{said.read_text(errors='replace')[-1000:]}")
        [run] = json.loads(path.read_text())["runs"]
    return {"seconds": seconds, "bytes": used, "messages": run["messages"]}


def _ended(child: subprocess.Popen[bytes], until: float) -> tuple[int, int]:
    """Wait for a process, and kill it at the time `until`. Return its exit status and its peak resident bytes."""
    try:
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid != 0:
                break
            if time.monotonic() > until:
                child.kill()
            time.sleep(0.02)
    except BaseException:
        child.kill()
        raise
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def plan(quick: bool) -> Plan:
    """Simulate each algorithm with each number of workers, one process after the other."""
    counts = (100, 200) if quick else COUNTS
    keys = [(algorithm, count) for algorithm in SETTINGS for count in counts]
    work = f"{__name__}:simulated"
    runs = yield [
        Run(work, {"algorithm": algorithm, "workers": count, "steps": STEPS}, cost=2000.0 + count, alone=True)
        for algorithm, count in keys
    ]
    found = dict(zip(keys, runs, strict=True))
    evidence = []
    for algorithm in SETTINGS:
        one = found[algorithm, counts[-1]]
        gib = one["bytes"] / 2**30
        what = f"{algorithm}, {counts[-1]:,} workers, {STEPS} steps"
        evidence.append(exact(f"{what}: seconds; at most {_MOST_S:g}", one["seconds"], one["seconds"] <= _MOST_S))
        evidence.append(exact(f"{what}: GiB; at most {_MOST_GIB:g}", gib, gib <= _MOST_GIB))
    rows = [{"algorithm": name, "workers": count, **found[name, count]} for name, count in keys]
    return Found(evidence, {"rows": rows})


def draw(shapes: Results, figure: Any) -> None:
    """Draw seconds and memory against the number of workers."""
    panels = figure.subplots(1, 2)
    for name in SETTINGS:
        mine = [row for row in shapes["rows"] if row["algorithm"] == name]
        counts = [row["workers"] for row in mine]
        panels[0].plot(counts, [row["seconds"] for row in mine], "-o", label=name)
        panels[1].plot(counts, [row["bytes"] / 2**20 for row in mine], "-o", label=name)
    for axes, label in zip(panels, ("seconds", "MiB"), strict=True):
        axes.set(xscale="log", yscale="log", xlabel="workers", ylabel=label)
    panels[0].legend(frameon=False)


CLAIM = Claim(
    name="sordino-scale",
    paper=SORDINO,
    place="sordino simulate",
    says=f"Without data, `sordino simulate` simulates up to 10^5 workers on one core within {_MOST_S:g} s and "
    f"{_MOST_GIB:g} GiB.",
    setting="`sordino simulate --help`, and [the design](../design/simulation-and-plans.md).",
    here=f"Scheduled pull and Crossover, {STEPS} steps of 10^3 to 10^5 workers, one process each, including its start "
    "and its imports.",
    plan=plan,
    why="Workers of the same speed step at the same times, so all of them share one event per time, and without data a "
    "step is arithmetic on arrays over the workers. So seconds and bytes grow with the number of workers; there is no "
    "event for each message. 100,000 workers take 13 s and 0.58 GiB with scheduled pulls, 2.6 s and 0.29 GiB with "
    "Crossover.",
    draw=draw,
)
