"""Trains virtual workers in virtual time, over links of any speed, to evaluate an algorithm for other hardware.

Models really train; times are computed. A transfer takes the latency, plus its bits over the rate of the slower end.
  sordino simulate --algorithm scheduled-pull --workers 8 --wide 2       # four ways: none, naive, manager, autonomous
  sordino simulate --algorithm adpsgd --set interval=8 --data none --workers 1000 --slow 7:3 --kill 0@1 --plot curve.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sordino.errors import NotBuilt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sordino simulate`."""
    parser.usage = "sordino simulate --algorithm NAME [options]"
    add = parser.add_argument_group("simulated training").add_argument
    add("--algorithm", required=True, metavar="NAME", help="scheduled-pull, adpsgd, allreduce, local-sgd, ...")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of the algorithm, such as interval=8")
    add("--compression", metavar="CODEC", help="codec of the gradients, such as int8 or powersgd")
    add("--workers", type=int, default=8, metavar="N", help="number of workers (default 8)")
    add("--data", choices=("fashion-mnist", "digits", "none"), default="fashion-mnist", metavar="SET",
        help="fashion-mnist (default), digits, or none: a quadratic function per worker")  # fmt: skip
    add("--data-dir", metavar="DIR", help="folder of Fashion-MNIST")
    add("--images", type=int, metavar="N", help="number of training images (default: all)")
    add("--channels", type=int, default=16, metavar="N", help="channels of the network's first layer (default 16)")
    add("--seconds", type=float, metavar="S", help="virtual time, in s (default: 2400 steps; 400 without data)")
    add("--steps", type=int, metavar="N", help="steps of each worker, instead of --seconds")
    add("--batch", type=int, default=16, metavar="N", help="images per step and worker (default 16)")
    add("--lr", type=float, default=0.01, help="learning rate (default 0.01)")
    add("--momentum", type=float, default=0.0, help="momentum of SGD (default 0)")
    add("--seed", type=int, action="append", default=[], metavar="N", help="seed; may be given repeatedly (default 1)")
    add("--seeds", type=int, metavar="N", help="seeds 1 to N; prints means and their spread")
    add = parser.add_argument_group("links, speeds and failures").add_argument
    add("--wide", type=int, default=0, metavar="W", help="number of workers with fast links, from 0 on (default 0)")
    add("--narrow-gbps", type=float, default=1.0, metavar="G", help="rate of the other links, in Gbit/s (default 1)")
    add("--wide-gbps", type=float, default=10.0, metavar="G", help="rate of the fast links, in Gbit/s (default 10)")
    add("--latency-ms", type=float, default=5.0, metavar="MS", help="latency of each message, in ms (default 5)")
    add("--links", metavar="FILE", help='JSON file instead: {"gbps": [a number for each worker], "latency_ms": 5}')
    add("--sharing", choices=("none", "fair"), default="none",
        metavar="HOW", help="fair: concurrent transfers share a link; none (default): they do not")  # fmt: skip
    add("--message-mib", type=float, metavar="M",
        help="transferred size of a model, in MiB (default: its size; four ways: 3.5)",
    )  # fmt: skip
    add("--compute-ms", metavar="MS",
        help="ms per step, or `measured` (default; four ways or no data: 10)")  # fmt: skip
    add("--slow", action="append", default=[], metavar="WORKER:FACTOR", help="factor by which its steps take longer")
    add("--load-ms", type=float, default=0.0, metavar="MS", help="data loading between two steps, in ms (default 0)")
    add("--kill", action="append", default=[], metavar="WORKER@S", help="virtual time at which a worker dies, in s")
    add("--mtbf", type=float, metavar="S", help="goodput: mean time of a worker between two failures, in s")
    add("--recover", type=float, metavar="S", help="goodput: time until a failed worker works again, in s")
    add("--pause-ms", type=float, metavar="MS", help="goodput: pause when others notice a loss, in ms (default 100)")
    add = parser.add_argument_group("output").add_argument
    add("--points", type=int, default=30, metavar="N", help="points of each learning curve (default 30)")
    add("--json", type=Path, metavar="FILE", help="file for all results")
    add("--plot", type=Path, metavar="FILE", help="file for the learning curves (.png, .svg or .pdf)")
    add("--gantt", type=Path, metavar="FILE", help="file for a Gantt chart of the beginning: compute, transfer, wait")
    add("--record", type=Path, metavar="DIR", help="folder for records, for `sordino report`")
    add("--processes", type=int, metavar="N", help="runs at the same time (default: the number of cores)")
    add("--quiet", action="store_true", help="print the table only")


def main(options: argparse.Namespace) -> int:
    """Run the simulation.

    Raises:
        UsageError: the options are invalid.
        NotBuilt: the core, or a package, is missing.
    """
    try:
        from sordino.simulate import command
    except ModuleNotFoundError as error:
        if error.name == "sordino._core":
            raise NotBuilt("Sordino's core is not built; `sordino doctor` says how to fix that") from error
        raise
    return command.main(options)
