"""What the simulator takes for many workers."""

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
STEPS = 32  # of each worker: two windows
SETTINGS = {"scheduled-pull": "overlap=scheduled", "crossover": "interval=16"}
_MOST_S, _MOST_GIB = 300.0, 2.0
_PER_RUN_S = 1200.0  # seconds that a process may take


def simulated(algorithm: str, workers: int, steps: int) -> Results:
    """Return the seconds of a process of `sordino simulate`, and the most bytes that it had at a time.

    Raises:
        SordinoError: it failed.
    """
    words = ["--algorithm", algorithm, "--set", SETTINGS[algorithm], "--data", "none", "--workers", str(workers)]
    words += ["--steps", str(steps), "--processes", "1", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        path, said = Path(folder) / "found.json", Path(folder) / "said"
        begin = time.monotonic()
        with said.open("w") as file:
            # Nothing else of this process waits for children, so this one's resources are its own.
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
    """Return the status and the largest resident size in bytes of a process that is ended at a time."""
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
    """Each algorithm by each number of workers, in a process of its own, alone."""
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
    """Draw seconds and memory by the number of workers."""
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
    says=f"Without data, up to 10^5 workers are simulated on one core, within {_MOST_S:g} s and {_MOST_GIB:g} GiB.",
    setting="`sordino simulate --help`, and [the design](design.md).",
    here=f"Scheduled pull and Crossover, {STEPS} steps of 10^3 to 10^5 workers, a process each, its start and what it "
    "imports among it.",
    plan=plan,
    why="Workers of one speed keep step, so what is due at one time is one event for all of them, and without data a "
    "step is arithmetic on arrays over the workers: seconds and bytes grow with the number of workers, not with an "
    "event for each message. 100,000 workers take 13 s and 0.58 GiB for scheduled pulls, 2.6 s and 0.29 GiB for "
    "Crossover.",
    draw=draw,
)
