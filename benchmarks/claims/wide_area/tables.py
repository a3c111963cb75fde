"""The source's Table 3 in small, by the simulator, and what the simulator takes for many workers.

  python benchmarks/wide_area.py tables
  python benchmarks/wide_area.py tables --wide 0        # and --wide 2, 6: a part of it, kept for a run of all

The comparison is `sordino simulate --algorithm scheduled-pull`: 8 workers train on Fashion-MNIST, of which 0, 2 and 6
have links of 10 Gbps and the others of 1 Gbps, windows of 16 steps, its four modes at equal virtual time, 3 seeds. The
trainings are real, time is computed, so it does not matter how busy the machine is. Finished simulations are kept in
`wide_area_simulations` beside the results until all are done.

Many workers: scheduled pull gossip, AD-PSGD and Crossover without data in a process each; seconds of wall time from
beginning to end, and the most memory that the process had at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from claims.wide_area.report import REPORTS
from cluster.jobs import failed
from sordino.bench import command_line
from sordino.errors import NotBuilt, SordinoError
from sordino.report import Results, machines, records, verdicts
from sordino.report.tables import format_seconds

WIDES = (0, 2, 6)
COUNTS = (1000, 10_000, 100_000)
STEPS = 32  # of each of so many workers: two windows
_SETTINGS = {  # by algorithm
    "scheduled-pull": ("overlap=scheduled",),
    "adpsgd": ("interval=16",),
    "crossover": ("interval=16",),
}
SOURCE = {  # Table 2: CIFAR-100, VGG16, best accuracy within 10,000 s, by the number of wide links
    "0": {"scheduled, manager": 0.582, "scheduled, autonomous": 0.583, "no overlap": 0.574},
    "2": {"scheduled, manager": 0.578, "scheduled, autonomous": 0.578, "no overlap": 0.574},
    "6": {"scheduled, manager": 0.575, "scheduled, autonomous": 0.577, "no overlap": 0.573},
}
_PER_RUN_S = 3600.0  # seconds that a process may take
_MODES = ("no overlap", "naive overlap", "scheduled, manager", "scheduled, autonomous")


class Simulation(NamedTuple):
    """One process, by the name under which what it found is kept."""

    name: str
    words: list[str]


def comparison(wide: int, seed: int, quick: bool, data_dir: str | None) -> Simulation:
    """The four modes with so many wide links."""
    words = ["--algorithm", "scheduled-pull", "--workers", "8", "--wide", str(wide), "--seed", str(seed)]
    short = ["--data", "digits", "--steps", "48", "--points", "3", "--processes", "1"]
    words += short if quick else ["--data", "fashion-mnist"]
    return Simulation(f"wide_{wide}_seed_{seed}", [*words, "--data-dir", data_dir] if data_dir else words)


def many(algorithm: str, workers: int) -> Simulation:
    """Many workers without data."""
    words = ["--algorithm", algorithm, "--data", "none", "--workers", str(workers), "--steps", str(STEPS)]
    words += [word for one in _SETTINGS[algorithm] for word in ("--set", one)]
    return Simulation(f"{algorithm}_{workers}", [*words, "--processes", "1"])


def run_all(simulations: Sequence[Simulation], folder: Path) -> list[Results]:
    """Simulates what is not in the folder yet, and puts it there; returns all in this order.

    Raises:
        SordinoError: one failed.
    """
    found = []
    for one in simulations:
        path = folder / f"{one.name}.json"
        kept = _kept(path)
        if kept.get("words") != one.words:
            kept = simulated(one.words) | {"name": one.name, "words": one.words}
            records.write(kept, folder)
            records.log(f"{one.name}: {format_seconds(kept['seconds'])}, {kept['bytes'] / 2**20:.0f} MiB")
        found.append(kept)
    return found


def _kept(path: Path) -> Results:
    """What an earlier run has found; nothing if it is not there, or not one of ours."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def simulated(words: Sequence[str]) -> Results:
    """What `sordino simulate` wrote as JSON, with the seconds and the most bytes that its process took."""
    with tempfile.TemporaryDirectory() as folder:
        path, said = Path(folder) / "found.json", Path(folder) / "said"
        command = [sys.executable, "-m", "sordino.cli", "simulate", *words, "--quiet", "--json", str(path)]
        begin = time.monotonic()
        with said.open("w") as file:
            # Nothing else of this process waits for children, so this one's resources are its own.
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
            status, used = _ended(child, begin + _PER_RUN_S)
        seconds = time.monotonic() - begin
        if status != 0:
            text = machines.without_paths(said.read_text(errors="replace")[-1000:])
            kind = NotBuilt if status == 2 else SordinoError
            raise kind(f"sordino simulate {' '.join(words)} ended with status {status}:\n{text}")
        return {"found": json.loads(path.read_text()), "seconds": seconds, "bytes": used}


def _ended(child: subprocess.Popen[bytes], until: float) -> tuple[int, int]:
    """The status and the largest resident size in bytes of a process that is ended at a time."""
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


def row_of(kept: Sequence[Results], wide: int) -> Results:
    """Means and deviations over the seeds, by mode, beside the source's figures. Gain: of the best accuracy over that
    without overlap, seed by seed."""
    first: Results = kept[0]["found"]
    everything = [run for one in kept for run in one["found"]["runs"]]
    modes: dict[str, Results] = {}
    bases = [run["best_accuracy"] for run in everything if run["mode"] == _MODES[0]]
    for mode in dict.fromkeys(run["mode"] for run in everything):
        runs = [run for run in everything if run["mode"] == mode]
        one: Results = {"source": first["source"].get(mode)}
        for key in ("accuracy", "best_accuracy", "consensus_distance"):
            one[key] = _spread([run[key] for run in runs])
        gains = [run["best_accuracy"] - base for run, base in zip(runs, bases)]
        one["gain"] = _spread(gains)
        one["waiting"] = statistics.mean(run["waiting"] / run["seconds"] for run in runs)
        for key in ("age", "steps", "pulls", "messages", "bytes"):
            one[key] = statistics.mean(run[key] for run in runs)
        one["curve"] = runs[0]["curve"]
        modes[mode] = one
    seconds = statistics.mean(run["seconds"] for run in everything)
    return {"wide": wide, "setting": first["setting"], "virtual_seconds": seconds, "modes": modes}


def scale_of(kept: Results) -> Results:
    """What a simulation of many workers took."""
    setting, run = kept["found"]["setting"], kept["found"]["runs"][0]
    row: Results = {"algorithm": run["mode"], "workers": setting["workers"], "steps": setting["steps"]}
    return row | {"messages": run["messages"], "seconds": kept["seconds"], "bytes": kept["bytes"]}


def _spread(values: Sequence[float]) -> Results:
    return {"mean": statistics.mean(values), "deviation": statistics.stdev(values) if len(values) > 1 else None}


def targets(rows: Sequence[Results]) -> list[Results]:
    """The source's order at equal time: scheduled above no overlap, naive below it; and scheduled is fresher."""
    entries = []
    for row in rows:
        gains = {mode: 100 * one["gain"]["mean"] for mode, one in row["modes"].items()}
        ages = {mode: one["age"] for mode, one in row["modes"].items()}
        _, naive, *scheduled = _MODES
        for mode in scheduled:
            what = f"{row['wide']} wide: {mode}, points over no overlap (source: above 0)"
            entries.append(verdicts.target(what, gains[mode], 0.0, at_least=True))
            what = f"{row['wide']} wide: naive overlap, points over {mode} (source: below 0)"
            entries.append(verdicts.target(what, gains[naive] - gains[mode], 0.0, at_least=False))
            what = f"{row['wide']} wide: {mode}, age over naive overlap's"
            entries.append(verdicts.target(what, ages[mode] / ages[naive], 0.9, at_least=False))
        what = f"{row['wide']} wide: naive overlap, points over no overlap (source: below 0)"
        entries.append(verdicts.target(what, gains[naive], 0.0, at_least=False))
    return entries


@contextmanager
def _work_folder(results: Path | None, keep: bool) -> Iterator[Path]:
    """Where single simulations are kept until all are done."""
    if results is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
        return
    folder = results / "wide_area_simulations"
    yield folder
    if not keep:
        shutil.rmtree(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulates what is not in the folder yet. Status 1 if a simulation failed, 2 if there can be none."""
    options = command_line.parser("wide_area tables", __doc__, 0.0, "(not used)")
    options.add_argument("--wide", type=int, choices=WIDES, help="only this comparison, kept for a run of all")
    options.add_argument("--many", choices=_SETTINGS, help="only many workers by this algorithm, kept for a run of all")
    options.add_argument("--workers", type=int, choices=COUNTS, help="with --many: only so many")
    options.add_argument("--seeds", type=int, metavar="N", help="trainings of each kind (default 3; 1 if --quick)")
    options.add_argument("--data-dir", metavar="DIR", help="the folder of the four Fashion-MNIST files")
    chosen = options.parse_args(argv)
    seeds = chosen.seeds or (1 if chosen.quick else 3)
    a_part = chosen.wide is not None or chosen.many is not None
    wides: Sequence[int] = WIDES[1:2] if chosen.quick else WIDES
    algorithms, counts = list(_SETTINGS), list(COUNTS)
    if chosen.quick:
        algorithms, counts = algorithms[:1], [100]
    if a_part:
        wides = [wide for wide in WIDES if wide == chosen.wide]
        algorithms = [name for name in _SETTINGS if name == chosen.many]
        counts = [count for count in COUNTS if chosen.workers in (None, count)]
    comparisons = [comparison(wide, seed + 1, chosen.quick, chosen.data_dir) for wide in wides for seed in range(seeds)]
    scales = [many(algorithm, count) for algorithm in algorithms for count in counts]
    folder = command_line.results_folder(chosen)
    with _work_folder(folder, keep=a_part) as work:
        try:
            found = run_all([*comparisons, *scales], work)
        except SordinoError as error:
            return failed("wide_area", error)
        if a_part:
            return 0
        rows = [row_of(found[k * seeds : (k + 1) * seeds], wide) for k, wide in enumerate(wides)]
        results: Results = {
            "benchmark": "wide_area_tables",
            "name": "wide_area_tables",
            "machine": machines.machine("simulated workers") | {"others": None},
            "seeds": seeds,
            "rows": rows,
            "scale": [scale_of(kept) for kept in found[len(comparisons) :]],
            "source": SOURCE,
            "targets": targets(rows),
        }
        records.publish(results, folder, REPORTS)
    return 0
