"""Table of a simulation's results, and its JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import sordino
from sordino.report import Results
from sordino.report.tables import format_seconds, table
from sordino.simulate.choices import Plan
from sordino.simulate.job import Failures, Job, Outcome
from sordino.simulate.links import exact

_GUESSING, _UNTRAINED = 0.1, 0.3  # accuracy of guessing with ten classes; accuracy below which modes cannot be compared
_BY_WORKER = 64  # largest number of workers for which the JSON has values by worker
_SOURCE = {
    0: {"scheduled, manager": 0.865, "scheduled, autonomous": 0.864, "no overlap": 0.860},
    2: {"scheduled, manager": 0.866, "scheduled, autonomous": 0.867, "no overlap": 0.861},
    6: {"scheduled, manager": 0.866, "scheduled, autonomous": 0.867, "no overlap": 0.862},
}
"""Table 3 of wan-gossip-scheduling: the best accuracy on Fashion-MNIST within 1000 s, by the number of wide links. The
paper calls naive overlap the worst, but gives no number for it."""


def score(final: Mapping[str, float]) -> str:
    """Return the final score of a run."""
    if "accuracy" in final:
        return f"accuracy {final['accuracy']:.2%}"
    return f"distance from the optimum {final['distance']:.4g}"


def setting(plan: Plan) -> str:
    """Return a description of the simulation, including values that were not given on the command line."""
    job = plan.runs[0].job
    gbps, compute = sorted(set(job.links.gbps.tolist())), sorted(set((1e3 * job.compute).round(4).tolist()))
    rates = " and ".join(f"{rate:g}" for rate in gbps) if len(gbps) < 4 else f"{gbps[0]:g} to {gbps[-1]:g}"
    steps = " and ".join(f"{one:.4g}" for one in compute) if len(compute) < 4 else f"{compute[0]:.4g} and more"
    length = f"{job.seconds:.4g} virtual seconds" if job.steps is None else f"{job.steps} steps each"
    origin = {"given": "", "default": " (default)", "measured": " (measured here)", "real": ""}
    images = "" if job.data == "none" else f", {job.batch} images per step"
    shared = ", shared fairly" if job.sharing == "fair" else ""
    codec = "" if job.codec is None else f", gradients with {job.codec}"
    return (
        f"{job.workers} workers, {job.data if job.data != 'none' else 'no data'}, {length}; links of {rates} Gbps, "
        f"{format_seconds(job.links.latency)} latency{shared}; "
        f"{_size(job.message_bytes)} per model{origin[plan.message]}{codec}, "
        f"{steps} ms per step{origin[plan.compute]}; "
        f"lr {job.lr:g}{images}"
    )


def _size(count: float) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**17 else f"{count:g} bytes"


def source(job: Job) -> dict[str, float]:
    """Return the results of wan-gossip-scheduling for this setting, by mode; empty if it does not have this setting."""
    wide = int((job.links.gbps == 10).sum())
    fits = job.data == "fashion-mnist" and job.workers == 8 and job.links.latency == exact(5e-3)
    rates = sorted(job.links.gbps.tolist()) == [1.0] * (8 - wide) + [10.0] * wide
    plain = not job.kills and job.sharing == "none" and len(set(job.compute.tolist())) == 1
    return _SOURCE.get(wide, {}) if fits and rates and plain else {}


def results(plan: Plan, outcomes: Sequence[Outcome]) -> Results:
    """Return all results."""
    job = plan.runs[0].job
    gbps = job.links.gbps.tolist() if job.workers <= _BY_WORKER else sorted(set(job.links.gbps.tolist()))
    runs = [
        {
            "mode": run.mode,
            "seed": run.job.seed,
            "algorithm": {"name": type(run.job.algorithm).__name__, **asdict(run.job.algorithm)},
            "seconds": outcome.seconds,
            **outcome.final,
            "goodput": None if outcome.goodput is None else asdict(outcome.goodput),
            **outcome.record.as_dict(by_worker=job.workers <= _BY_WORKER),
        }
        for run, outcome in zip(plan.runs, outcomes, strict=True)
    ]
    return {
        "what": "simulation",
        "version": sordino.__version__,
        "setting": {
            "workers": job.workers,
            "data": job.data,
            "seconds": job.seconds,
            "steps": job.steps,
            "gbps": [rate if math.isfinite(rate) else "inf" for rate in gbps],
            "latency": job.links.latency,
            "message_bytes": job.message_bytes,
            "message_from": plan.message,
            "compute": job.compute.tolist() if job.workers <= _BY_WORKER else sorted(set(job.compute.tolist())),
            "compute_from": plan.compute,
            "load": job.load,
            "batch": job.batch,
            "lr": job.lr,
            "momentum": job.momentum,
            "images": job.images,
            "channels": job.channels,
            "compression": None if job.codec is None else repr(job.codec),
            "sharing": job.sharing,
            "kills": [list(kill) for kill in job.kills],
            "failures": None if job.failures is None else asdict(job.failures),
        },
        "source": source(job) if plan.comparison else {},
        "runs": runs,
    }


def text(plan: Plan, found: Results) -> str:
    """Return the table, with its legend and warnings."""
    modes = list(dict.fromkeys(run["mode"] for run in found["runs"]))
    by_mode = {mode: [run for run in found["runs"] if run["mode"] == mode] for mode in modes}
    what = "accuracy" if "accuracy" in found["runs"][0] else "distance"
    columns: list[tuple[str, Callable[[str, list[Results]], str]]] = [
        ("accuracy" if what == "accuracy" else "distance", lambda _, runs: _spread(runs, what)),
        ("best", lambda _, runs: _spread(runs, f"best_{what}")),
    ]
    if found["source"]:
        columns.append(("source", lambda mode, _: _percent(found["source"].get(mode))))
    columns += [
        ("waiting", lambda _, runs: f"{_mean(runs, 'waiting') / _mean(runs, 'seconds'):.1%}"),
        ("age", lambda _, runs: _age(runs)),
        ("steps", lambda _, runs: f"{_mean(runs, 'steps'):.0f}"),
        ("pulls", lambda _, runs: f"{_mean(runs, 'pulls'):.1f}"),
        ("messages", lambda _, runs: f"{_mean(runs, 'messages'):.1f}"),
        ("MB sent", lambda _, runs: f"{_mean(runs, 'bytes') / 1e6:.4g}"),
        ("virtual s", lambda _, runs: f"{_mean(runs, 'seconds'):.4g}"),
    ]
    failures = plan.runs[0].job.failures
    if failures is not None:
        columns += [
            ("restart", lambda _, runs: _goodput(runs, "restart")),
            ("continue", lambda _, runs: _goodput(runs, "after_loss")),
        ]
    rows = [[mode, *(cell(mode, runs) for _, cell in columns)] for mode, runs in by_mode.items()]
    blocks = [table(["", *(head for head, _ in columns)], rows), _legend(what, len(plan.runs) // len(modes))]
    if failures is not None:
        blocks.append(_goodput_legend(failures))
    if plan.comparison and len(plan.runs) > len(modes):
        blocks.append(_gains(by_mode, what))
    if found["source"]:
        blocks.append(
            "source: the best accuracy in Table 3 of wan-gossip-scheduling (another network, 1000 s); it calls naive "
            "overlap the worst, without a number."
        )
    untrained = [
        mode for mode, runs in by_mode.items() if what == "accuracy" and _mean(runs, "best_accuracy") < _UNTRAINED
    ]
    if untrained:
        blocks.append(
            f"warning: too little training: {'; '.join(untrained)}. Guessing is right in {_GUESSING:.0%}, so low "
            "accuracies like these show no difference. Give more --steps or --seconds, or another --lr."
        )
    blocks += [f"warning: {line}" for line in dict.fromkeys(line for run in found["runs"] for line in run["warnings"])]
    return "\n".join(blocks)


def _legend(what: str, seeds: int) -> str:
    scored = (
        "mean over workers of the test accuracy at the end, and at its best"
        if what == "accuracy"
        else "mean over workers of the distance from the optimum at the end, and at its best"
    )
    several = f"; means of {seeds} seeds, +- their standard deviation" if seeds > 1 else ""
    return (
        f"{scored}{several}. Waiting: fraction of the time. Age: time from the copying of a model to its averaging. "
        "Steps, pulls, messages and bytes: per worker."
    )


def _goodput(runs: Sequence[Results], way: str) -> str:
    values = [run["goodput"][way] for run in runs]
    return "" if values[0] is None else f"{statistics.mean(values):.1%}"


def _goodput_legend(failures: Failures) -> str:
    return (
        "Restart, continue: goodput, which is useful steps per second relative to the same run without failures. "
        f"Each worker fails every {failures.mtbf:g} s on average, and works again {failures.recover:g} s later. "
        "Restart: all wait for it. Continue: the others go on, and those that exchange with it pause for "
        f"{format_seconds(failures.pause)}. Empty: not possible with this algorithm."
    )


def _gains(by_mode: Mapping[str, list[Results]], what: str) -> str:
    """Return the gain of each mode over the first one, compared seed by seed."""
    first, *others = by_mode
    parts = []
    for mode in others:
        gains = [a[f"best_{what}"] - b[f"best_{what}"] for a, b in zip(by_mode[mode], by_mode[first], strict=True)]
        mean, error = statistics.mean(gains), _deviation(gains) / len(gains) ** 0.5
        scale, unit = (100, " points") if what == "accuracy" else (1, "")
        parts.append(f"{mode} {scale * mean:+.3g} +- {scale * error:.2g}{unit}")
    return f"best {what} against {first}, mean and standard error over the seeds: {'; '.join(parts)}."


def _mean(runs: Sequence[Results], key: str) -> float:
    return float(statistics.mean(run[key] for run in runs))


def _spread(runs: Sequence[Results], key: str) -> str:
    values = [run[key] for run in runs]
    percent = key.endswith("accuracy")
    mean = f"{statistics.mean(values):.2%}" if percent else f"{statistics.mean(values):.4g}"
    if len(values) == 1:
        return mean
    spread = _deviation(values)
    return f"{mean} +- {100 * spread:.2f}" if percent else f"{mean} +- {spread:.2g}"


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation; nan if a value is not finite, as after a run that has diverged."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _age(runs: Sequence[Results]) -> str:
    ages = [run["age"] for run in runs if run["age"] is not None]
    return format_seconds(statistics.mean(ages)) if ages else ""
