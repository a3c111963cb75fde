"""Measures the cost of communication here, and recommends an algorithm for training.

  sordino plan -np 4
  sordino plan -np 8 --hosts node1:4,node2:4 --parameters 25.6M --compute-ms 120 --samples 1281167 --batch 32
  sordino plan -np 4 --task train.py:task        # a function that returns a sordino.plan.Task
  sordino plan --nodes 4x2 --gbps 10             # predicts only, for 4 nodes of 2 ranks elsewhere

It measures seconds per message and seconds per byte within and between nodes. From these and the bytes that each
algorithm sends it predicts the time per step. Then it runs each algorithm for a few steps to compare, and trains a few
numbers of local models to find the best one.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from sordino.cli import run
from sordino.errors import NotBuilt, UsageError
from sordino.report.records import make_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sordino plan`."""
    parser.usage = "sordino plan -np N [options]"
    parser.add_argument("-np", dest="ranks", type=int, metavar="N", help="number of ranks (default: those of mpirun)")
    parser.add_argument("--hosts", metavar="H1:SLOTS,H2:SLOTS", help="hosts of the ranks (default: this machine)")
    parser.add_argument("--nodes", metavar="NxR", help="assumed cluster of N nodes of R ranks; nothing is run")
    parser.add_argument("--gbps", type=float, metavar="G", help="rate of an assumed node's link, each way, in Gbit/s")
    parser.add_argument("--latency-us", type=float, default=30.0, metavar="US", help="its latency, in µs (default 30)")
    parser.add_argument("--parameters", metavar="N", help="size of the model (default: that of the task, or 25.6M)")
    parser.add_argument(
        "--compute-ms", type=float, default=100.0, metavar="MS", help="computation per step, in ms (default 100)"
    )
    parser.add_argument("--samples", type=int, default=50000, metavar="N", help="samples per epoch (default 50000)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="samples per step and worker (default 32)")
    parser.add_argument(
        "--interval", type=int, default=8, metavar="N", help="averaging interval of local SGD, in steps (default 8)"
    )
    parser.add_argument(
        "--task", metavar="FILE.py:FUNCTION", help="function that returns a sordino.plan.Task, to try local models on"
    )
    parser.add_argument(
        "--data", choices=("digits", "fashion-mnist", "none"),
        help="without a task: data on which a small network tries local models (default: digits, if installed)",
    )  # fmt: skip
    parser.add_argument("--data-dir", metavar="DIR", help="folder of Fashion-MNIST")
    parser.add_argument(
        "--rule", choices=("linear", "sqrt", "none"), default="linear",
        help="growth of the learning rate with the number of local models (default linear)",
    )  # fmt: skip
    parser.add_argument("--budget", type=float, default=30.0, metavar="S", help="approximate time, in s (default 30)")
    parser.add_argument("--no-run", action="store_true", help="predict only; do not run the algorithms")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the tables")
    parser.add_argument("--record", type=Path, metavar="DIR", help="folder for a record, for `sordino report`")
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder for plan.json, plan.md and plan.png")


def main(options: argparse.Namespace) -> int:
    """Make the plan on this job's ranks or, with -np, on ranks that it starts.

    Raises:
        UsageError: the options are invalid.
        NotBuilt: the core is missing.
    """
    _check(options)
    if options.results is not None and (options.ranks is not None or options.nodes is not None):
        make_folder(options.results)  # here, as the ranks may have other folders
    count = None if options.parameters is None else parse_count(options.parameters)
    if options.nodes is None and options.ranks is not None:
        return run.plain(options.ranks, ["sordino", "plan", *_words(options)], options.hosts)
    try:
        from sordino.plan import command as plan
    except ModuleNotFoundError as error:
        if error.name == "sordino._core":
            raise NotBuilt("Sordino's core is not built; `sordino doctor` says how to fix that") from error
        raise
    try:
        return (plan.main if options.nodes is None else plan.assume)(options, count)
    except (UsageError, NotBuilt) as error:  # raised on all ranks; one prints it
        if plan.is_first():
            raise
        return 2 if isinstance(error, UsageError) else 1


def _check(options: argparse.Namespace) -> None:
    for name, least in (("samples", 1), ("batch", 1), ("interval", 1)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name} {getattr(options, name)}: must be at least {least}")
    for name in ("compute_ms", "budget"):
        value = getattr(options, name)
        if not math.isfinite(value) or value < 0 or (name == "budget" and value == 0):
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be above 0")
    if options.hosts is not None and options.ranks is None:
        raise UsageError("--hosts needs -np: without -np, mpirun has started the ranks already")
    if options.nodes is None and options.gbps is not None:
        raise UsageError("--gbps is the rate of an assumed cluster's links; it needs --nodes, as in --nodes 4x2")
    for name in ("ranks", "hosts", "task", "data"):
        if options.nodes is not None and getattr(options, name) is not None:
            flag = "-np" if name == "ranks" else f"--{name}"
            raise UsageError(f"--nodes assumes a cluster and runs nothing, so it cannot be combined with {flag}")


def _words(options: argparse.Namespace) -> list[str]:
    """Return the options for the command line of the ranks."""
    words = [word for word, chosen in (("--no-run", options.no_run), ("--json", options.json)) if chosen]
    for name in (
        *("parameters", "compute_ms", "samples", "batch", "interval", "task", "data", "data_dir", "rule", "budget"),
        "results",
        "record",
    ):
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def parse_count(text: str) -> int:
    """Parse a count such as 25600000, 25.6M, 350k or 1.3B. Raises UsageError for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMbBgG]?)", text.strip())
    unit = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
    count = round(float(match[1]) * unit[match[2].lower()]) if match else 0
    if count < 1:
        raise UsageError(f"--parameters {text}: expected a number like 25600000, 25.6M or 350k")
    return count
