"""Loss and bytes sent of every algorithm on a small language model: the frontier between communication and quality.

  python benchmarks/frontier.py                       # everything: about an hour on 2 cores
  python benchmarks/frontier.py --only diloco         # rows with this word in their names
  python benchmarks/frontier.py --runs FOLDER         # keeps each run, so an interrupted benchmark continues

Each run is `sordino run -np N -- python examples/language.py` with equal tokens, batch, text, schedule and, with equal
seeds, equal initial weights and batches. Only the algorithm, its settings and the learning rate differ. The learning
rate of a row is the best of LEARNING_RATES for it, with the first seed: a rate that suits the mean of all gradients is
too high for workers that train apart. Losses are those of the model that the algorithm recommends, on held-out text.
The result of an algorithm is the difference of its loss from the baseline's with the same seed, as a mean and its
standard error over the seeds.

The bytes are those that rank 0 sends in training. Time does not matter: the losses of a run have the same bits however
busy the machine is.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import sordino
from sordino.bench import command_line
from sordino.errors import UsageError
from sordino.report import Results, machines, records
from timings.frontier import REPORTS, targets

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
MODEL = {"layers": 2, "width": 96, "heads": 4, "context": 64, "batch": 32, "tokens": 1_048_576}
QUICK = {"layers": 1, "width": 32, "heads": 2, "context": 32, "batch": 8, "tokens": 16_384}
LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
SEEDS = (1, 2, 3)
VERSIONS = {module.__name__: module.__version__ for module in (sordino, torch)} | {"python": platform.python_version()}


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
        name: unique name.
        options: options of examples/language.py.
        ranks: number of ranks.
    """

    name: str
    options: tuple[str, ...]
    ranks: int = RANKS


def _entry(name: str, algorithm: str, *settings: str, compression: str | None = None, ranks: int = RANKS) -> Entry:
    options = ["--algorithm", algorithm]
    for setting in settings:
        options += ["--set", setting]
    if compression is not None:
        options += ["--compression", compression]
    return Entry(name, tuple(options), ranks)


BASELINE = _entry("all-reduce", "allreduce")
ENTRIES = (
    BASELINE,
    *(
        _entry(f"all-reduce, {codec}", "allreduce", compression=codec)
        for codec in ("int8", "int4", "twobit", "sign", "topk")
    ),
    _entry("all-reduce, PowerSGD rank 2", "allreduce", compression="PowerSGD(rank=2)"),
    *(_entry(f"local SGD, H = {every}", "local-sgd", f"interval={every}") for every in (16, 64)),
    _entry("local SGD in groups of 2, H = 16", "local-sgd", "interval=16", "group_size=2"),
    _entry("local SGD, H = 16, int4", "local-sgd", "interval=16", compression="int4"),
    *(_entry(f"DiLoCo, H = {every}", "diloco", f"interval={every}") for every in (16, 64, 256)),
    _entry("DiLoCo, H = 16, int4", "diloco", "interval=16", compression="int4"),
    _entry("DiLoCo, H = 64, int4", "diloco", "interval=64", compression="int4"),
    _entry("DiLoCo, H = 64, one worker", "diloco", "interval=64", ranks=1),
    _entry("streaming DiLoCo, H = 16, 4 fragments", "diloco", "interval=16", "fragments=4", "overlap=2", "mix=0.5"),
    _entry("SparseLoCo, H = 16", "sparse-loco", "interval=16"),
    *(_entry(f"NoLoCo, H = {every}", "noloco", f"interval={every}") for every in (16, 64)),
    _entry("NoLoCo, H = 16, int4", "noloco", "interval=16", compression="int4"),
    _entry("Crossover", "crossover"),
    _entry("Crossover, int8", "crossover", compression="int8"),
    _entry("D-PSGD", "dpsgd"),
    _entry("push-sum (SGP)", "push-sum"),
    _entry("CaPS", "caps"),
)


def run(entry: Entry, model: Mapping[str, int], lr: float, seed: int, folder: Path) -> dict[str, Any]:
    """Return the settings of one run and the last point of its curve. A run that the folder has is not repeated.

    Raises:
        RuntimeError: the run has failed.
        UsageError: the run in the folder is of other versions.
    """
    words = [word for name, value in model.items() for word in (f"--{name}", str(value))]
    words += [*entry.options, "--lr", str(lr), "--seed", str(seed)]
    kept = folder / f"{abs(hash_of((entry.ranks, *words))):x}.json"
    if not kept.exists():
        script = str(ROOT / "examples" / "language.py")
        steps = str(model["tokens"] // (model["batch"] * model["context"]))
        half = kept.with_suffix(".part")
        command = [sys.executable, "-m", "sordino.cli", "run", "-np", str(entry.ranks), "--", sys.executable, script]
        done = subprocess.run(
            [*command, *words, "--evaluate-every", steps, "--json", str(half)], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"{entry.name}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        half.replace(kept)
    read = json.loads(kept.read_text())
    if read["settings"]["versions"] != VERSIONS:
        raise UsageError(f"{kept} was made with other versions: {read['settings']['versions']}. Remove the folder")
    return {"settings": read["settings"], **read["curve"][-1]}


def hash_of(words: Sequence[object]) -> int:
    """Return a hash that is the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "big")


def best_rate(
    entry: Entry, model: Mapping[str, int], rates: Sequence[float], folder: Path
) -> tuple[float, dict[str, float]]:
    """Return the learning rate with the least loss, and the losses of all tried rates, with the first seed.

    The search begins in the middle of the ascending rates, and continues in each direction as long as the loss falls.
    """
    losses: dict[float, float] = {}

    def loss(index: int) -> float:
        rate = rates[index]
        if rate not in losses:
            found = run(entry, model, rate, SEEDS[0], folder)["loss"]
            losses[rate] = math.inf if math.isnan(found) else found
        return losses[rate]

    best = len(rates) // 2
    for step in (-1, 1):
        while 0 <= best + step < len(rates) and loss(best + step) < loss(best):
            best += step
    return rates[best], {str(rate): value for rate, value in sorted(losses.items())}


def row_of(entry: Entry, runs: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the table from the runs of all seeds."""
    differences = [one["loss"] - other["loss"] for one, other in zip(runs, baseline)]
    spread = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return {
        "name": entry.name,
        "written": runs[0]["settings"]["written"],
        "options": list(entry.options),
        "ranks": entry.ranks,
        "losses": [one["loss"] for one in runs],
        "loss": statistics.mean(one["loss"] for one in runs),
        "difference": statistics.mean(differences),
        "standard_error": spread,
        "sent_bytes": runs[0]["sent_bytes"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Status 1 if a run has failed; the results then have all other rows."""
    options = command_line.parser("frontier", __doc__)
    options.add_argument(
        "--only", default="", metavar="WORD", help="only rows with this word in their names, and the baseline"
    )
    options.add_argument(
        "--runs", type=Path, metavar="FOLDER", help="folder that keeps the runs (default: a temporary one)"
    )
    options.add_argument(
        "--seeds", type=int, default=len(SEEDS), metavar="N", help=f"seeds 1 to N (default {len(SEEDS)})"
    )
    chosen = options.parse_args(argv)
    if chosen.seeds < 1:
        raise UsageError(f"--seeds {chosen.seeds}: needs at least 1")
    model, rates = (QUICK, LEARNING_RATES[:1]) if chosen.quick else (MODEL, LEARNING_RATES)
    seeds = range(1, chosen.seeds + 1)
    entries = [entry for entry in ENTRIES if entry is BASELINE or chosen.only in entry.name]
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        baseline: list[dict[str, Any]] = []
        rows = []
        for entry in entries:
            records.log(f"frontier: {entry.name}")
            try:
                lr, losses = best_rate(entry, model, rates, folder)
                runs = [run(entry, model, lr, seed, folder) for seed in seeds]
            except RuntimeError as error:
                if entry is BASELINE:
                    raise
                failed[entry.name] = str(error)
                records.log(str(error))
                continue
            baseline = baseline or runs
            rows.append(row_of(entry, runs, baseline) | {"lr": lr, "rates": losses})
    settings = baseline[0]["settings"]
    results: Results = {
        "benchmark": "frontier",
        "name": "frontier",
        "machine": machines.machine(None) | {"others": None},  # time does not matter
        "model": model,
        "parameters": settings["parameters"],
        "steps": settings["steps"],
        "text_sha256": settings["text_sha256"],
        "versions": settings["versions"],
        "rates": list(rates),
        "seeds": list(seeds),
        "rows": rows,
        "failed": failed,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
