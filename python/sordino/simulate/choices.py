"""Conversion of the options of `sordino simulate` to jobs. Errors in options are reported before anything runs."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sordino.algorithms
from sordino.algorithms import Algorithm, AllReduce
from sordino.algorithms.settings import configured
from sordino.codecs import codec_of
from sordino.errors import NotBuilt, UsageError
from sordino.simulate.checks import check
from sordino.simulate.job import Failures, Job
from sordino.simulate.links import LONGEST, SLOWEST_GBPS, Floats, Links, exact
from sordino.simulate.problem import problem_of
from sordino.suggestions import meant

_STEPS, _STEPS_WITHOUT_DATA = 2400, 400  # steps in the default virtual time
_COMPUTE = 10e-3  # seconds; long compared with a transfer, as in wan-gossip-scheduling
_MESSAGE = 3.5 * 2**20  # bytes of the network of wan-gossip-scheduling
_MEASURED = 10  # steps
# A larger value is a mistake, and would overflow or fill the memory.
_MOST = {"workers": 10**6, "seeds": 10**4, "points": 10**6, "channels": 1024, "seconds": 1e9, "message_mib": 2.0**30}
_MOST |= {"latency_ms": LONGEST * 1e3, "load_ms": LONGEST * 1e3, "slow": 1e6, "kill": 1e9}
_LONGEST = 1e12  # seconds of --mtbf and --recover
_WINDOWS, _OTHER_STEPS = 5, 8  # windows, or steps of other algorithms, that a Gantt plot shows


@dataclass(frozen=True)
class Run:
    """One simulation of a command."""

    mode: str
    job: Job

    @property
    def title(self) -> str:
        """Title for the progress bar."""
        return f"{self.mode}, seed {self.job.seed}"


@dataclass(frozen=True)
class Plan:
    """All simulations of a command.

    Attributes:
        compute: source of the duration of a step: "given", "default" or "measured".
        message: source of the bytes of a model: "given", "default" or "real".
    """

    runs: list[Run]
    compute: str
    message: str
    comparison: bool


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the simulations that the options ask for.

    Raises:
        UsageError: an option is wrong. NotBuilt: a package is missing.
    """
    _check_numbers(options)
    _check_files(options)
    cls = _class_of(options.algorithm)
    named = {text.partition("=")[0] for text in options.set}
    modes = cls.simulation.modes
    comparison = bool(modes) and not named & {word.partition("=")[0] for words in modes.values() for word in words}
    if not comparison:
        modes = {options.algorithm: ()}
    links, failures = _links(options), _failures(options)
    codec = codec_of(options.compression, "--compression")
    compute, compute_from = _compute(options, comparison)
    message, message_from = _message(options, comparison)
    seeds = list(range(1, options.seeds + 1)) if options.seeds else options.seed or [1]
    kills = tuple(sorted((_pair(text, "kill", "@", options.workers) for text in options.kill), key=lambda one: one[1]))
    for worker, _ in kills:
        if sum(worker == other for other, _ in kills) > 1:
            raise UsageError(f"--kill {worker}@...: worker {worker} is given twice; it dies only once")
    seconds = options.seconds
    if seconds is None and options.steps is None:
        steps = _STEPS_WITHOUT_DATA if options.data == "none" else _STEPS
        seconds = steps * exact(float(np.median(compute)))  # so that the last step is not cut off
    seeded = any(field.name == "seed" for field in fields(cls))
    runs = []
    for place, seed in enumerate(seeds):
        for mode, words in modes.items():
            more = {"seed": seed} if seeded else {}
            algorithm = configured(cls, options.algorithm, [*options.set, *words], **more)
            job = Job(
                algorithm, options.workers, links, compute, message, options.steps, seconds, seed, options.data,
                options.data_dir, options.lr, options.momentum, options.batch, load=options.load_ms / 1e3,
                points=options.points, kills=kills,
                images=options.images, channels=options.channels, sharing=options.sharing, failures=failures,
                codec=codec,
                spans_until=_beginning(algorithm, compute, options) if place == 0 else 0.0,
            )  # fmt: skip
            check(job)
            runs.append(Run(mode, job))
    return Plan(runs, compute_from, message_from, comparison)


def _class_of(name: str) -> type[Algorithm]:
    name, known = sordino.algorithms.current_name(name), sordino.algorithms.names()
    if name not in known and ":" not in name:
        raise UsageError(
            f"--algorithm {name}: unknown; use one of {', '.join(known)}, or module:Class{meant(name, known)}"
        )
    try:
        return sordino.algorithms.class_of(name)
    except UsageError as error:
        raise UsageError(f"--algorithm {name}: {error}") from error


def _check_numbers(options: argparse.Namespace) -> None:
    least = {"workers": 1, "steps": 1, "batch": 1, "seeds": 1, "points": 1, "processes": 1, "wide": 0}
    least |= {"images": 1, "channels": 1}
    for name, limit in least.items():
        value = getattr(options, name)
        if value is not None and value < limit:
            raise UsageError(f"--{name} {value}: must be at least {limit}")
    for name in ("seconds", "narrow_gbps", "wide_gbps", "message_mib", "lr"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise UsageError(f"{_flag(name)} {value:g}: must be above 0")
    for name in ("latency_ms", "load_ms", "momentum"):
        value = getattr(options, name)
        if not 0 <= value < math.inf:
            raise UsageError(f"{_flag(name)} {value:g}: must be at least 0")
    for name in ("seconds", "message_mib", "lr"):
        if getattr(options, name) == math.inf:
            raise UsageError(f"{_flag(name)} inf: must be finite")
    for name in ("workers", "seeds", "points", "channels", "seconds", "message_mib", "latency_ms", "load_ms"):
        value = getattr(options, name)
        if value is not None and value > _MOST[name]:
            raise UsageError(f"{_flag(name)} {value:g}: must be at most {_MOST[name]:.10g}")
    for name in ("narrow_gbps", "wide_gbps"):
        if getattr(options, name) < SLOWEST_GBPS:
            raise UsageError(f"{_flag(name)} {getattr(options, name):g}: must be at least {SLOWEST_GBPS:g}")
    if options.steps is not None and options.seconds is not None:
        raise UsageError("--steps and --seconds: both determine the end of a run; give one of them")
    if options.seed and options.seeds:
        raise UsageError("--seed and --seeds: give one of them; --seeds N means --seed 1 to --seed N")
    for seed in options.seed:
        if options.seed.count(seed) > 1:
            raise UsageError(f"--seed {seed}: is given twice; a second run with it has the same result")
        if not 0 <= seed < 1 << 63:
            raise UsageError(f"--seed {seed}: must be from 0 to 2^63 - 1")
    if options.wide > options.workers:
        raise UsageError(f"--wide {options.wide}: there are only {options.workers} workers")
    if options.data == "none":
        for name, default in (("images", None), ("channels", Job.channels)):
            if getattr(options, name) != default:
                raise UsageError(f"--{name} {getattr(options, name)}: there are no images with --data none")
    if options.data_dir is not None and options.data != "fashion-mnist":
        raise UsageError(f"--data-dir {options.data_dir}: needs --data fashion-mnist, not {options.data}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_files(options: argparse.Namespace) -> None:
    for name in ("json", "plot", "gantt"):
        path: Path | None = getattr(options, name)
        if path is not None and not path.resolve().parent.is_dir():
            raise UsageError(f"--{name} {path}: there is no folder {path.resolve().parent}")
        if path is not None and not os.access(path.resolve().parent, os.W_OK):
            raise UsageError(f"--{name} {path}: the folder {path.resolve().parent} cannot be written")
    for name in ("plot", "gantt"):
        path = getattr(options, name)
        if path is None:
            continue
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise UsageError(f"--{name} {path}: name a .png, .svg or .pdf file")
        if importlib.util.find_spec("matplotlib") is None:
            raise NotBuilt(f"--{name} needs matplotlib, which is missing: pip install 'sordino[simulate]'")


def _links(options: argparse.Namespace) -> Links:
    if options.links is not None:
        if options.wide:
            raise UsageError(
                f"--wide {options.wide}: --links {options.links} gives the rates of all links; omit --wide"
            )
        return Links.read(options.links, options.workers)
    latency = options.latency_ms / 1e3
    return Links.wide(options.workers, options.wide, options.narrow_gbps, options.wide_gbps, latency)


def _failures(options: argparse.Namespace) -> Failures | None:
    if options.mtbf is None and options.recover is None:
        if options.pause_ms is not None:
            raise UsageError(f"--pause-ms {options.pause_ms:g}: has no effect without --mtbf")
        return None
    if options.mtbf is None or options.recover is None:
        given, missing = ("recover", "mtbf") if options.mtbf is None else ("mtbf", "recover")
        raise UsageError(f"--{given} {getattr(options, given):g}: give --{missing}, too, in seconds")
    if not 0 < options.mtbf <= _LONGEST:
        raise UsageError(f"--mtbf {options.mtbf:g}: must be above 0, and at most {_LONGEST:g}")
    if not 0 <= options.recover <= _LONGEST:
        raise UsageError(f"--recover {options.recover:g}: must be at least 0, and at most {_LONGEST:g}")
    if options.pause_ms is None:
        return Failures(options.mtbf, options.recover)
    if not 0 <= options.pause_ms <= _LONGEST:
        raise UsageError(f"--pause-ms {options.pause_ms:g}: must be at least 0, and at most {_LONGEST:g}")
    return Failures(options.mtbf, options.recover, options.pause_ms / 1e3)


def _pair(text: str, option: str, mark: str, workers: int) -> tuple[int, float]:
    """Parse WORKER:FACTOR or WORKER@SECONDS."""
    first, _, second = text.partition(mark)
    try:
        worker, number = int(first), float(second)
    except ValueError as error:
        form = "WORKER:FACTOR, such as 3:2.5" if option == "slow" else "WORKER@SECONDS, such as 3@2.5"
        raise UsageError(f"--{option} {text}: expected {form}") from error
    if not 0 <= worker < workers:
        raise UsageError(f"--{option} {text}: the worker must be from 0 to {workers - 1}")
    if not 0 < number < math.inf:
        raise UsageError(f"--{option} {text}: {second} must be above 0")
    if number > _MOST[option]:
        raise UsageError(f"--{option} {text}: {second} must be at most {_MOST[option]:g}")
    return worker, number


def _compute(options: argparse.Namespace, comparison: bool) -> tuple[Floats, str]:
    """Return the seconds of a step by worker, and their source."""
    said = options.compute_ms
    if said is None and (comparison or options.data == "none"):
        seconds, source = _COMPUTE, "default"
    elif said is None or said == "measured":
        seconds, source = _measure(options), "measured"
    else:
        try:
            seconds, source = float(said) / 1e3, "given"
        except ValueError as error:
            raise UsageError(f"--compute-ms {said}: expected a number or `measured`") from error
        if not 0 < seconds < math.inf:
            raise UsageError(f"--compute-ms {said}: must be above 0")
        if not 0 < exact(min(seconds, 2 * LONGEST)) <= LONGEST:
            raise UsageError(f"--compute-ms {said}: must be from 1e-7 to {LONGEST * 1e3:.0f}")
    found = np.full(options.workers, seconds)
    for text in options.slow:
        worker, factor = _pair(text, "slow", ":", options.workers)
        found[worker] *= factor
        if not 0 < exact(float(found[worker])) <= LONGEST:
            raise UsageError(
                f"--slow {text}: a step takes {found[worker]:g} s, which must be above 0 and at most {LONGEST:g}"
            )
    return found, source


def _measure(options: argparse.Namespace) -> float:
    """Return the mean duration of a step on this machine, on one thread as in the simulation."""
    if options.data == "none":
        raise UsageError("--compute-ms measured: needs data; give a number")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        problem = problem_of(_trial(options))
        for count in (3, _MEASURED):  # the first ones are slow
            begin = time.perf_counter()
            for _ in range(count):
                problem.gradient([0])
                problem.step([0])
        return (time.perf_counter() - begin) / _MEASURED
    finally:
        torch.set_num_threads(threads)


def _message(options: argparse.Namespace, comparison: bool) -> tuple[float, str]:
    if options.message_mib is not None:
        return options.message_mib * 2**20, "given"
    if comparison:
        return _MESSAGE, "default"
    if options.data == "none":
        return 4.0 * Job.dimension, "real"
    return float(problem_of(_trial(options)).parameter_bytes), "real"


def _trial(options: argparse.Namespace) -> Job:
    """Return a job of one worker with the same model, for measurements."""
    return Job(
        AllReduce(), 1, Links([1.0], 0.0), np.ones(1), 1.0, 1,
        data=options.data, data_dir=options.data_dir, lr=options.lr, momentum=options.momentum, batch=options.batch,
        channels=options.channels,
    )  # fmt: skip


def _beginning(algorithm: Any, compute: Floats, options: argparse.Namespace) -> float:
    """Return how many virtual seconds of the beginning a Gantt plot or a report shows."""
    if options.gantt is None and options.record is None:
        return 0.0
    windows = not algorithm.traits.synchronous
    steps = _WINDOWS * algorithm.interval if windows and algorithm.interval > 1 else _OTHER_STEPS
    return float(steps * (np.median(compute) + options.load_ms / 1e3))
