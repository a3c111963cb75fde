"""Options of `train.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import sordino.torch as hvd
from laboratory.algorithm import Parser, add_algorithm, algorithm_among
from laboratory.recipes import RECIPES
from sordino.algorithms import Algorithm
from sordino.errors import UsageError

FIXED = (
    *("algorithm", "set", "compression", "data", "batch_size", "accumulate", "recipe", "lr", "momentum"),
    *("label_smoothing", "bfloat16", "seed"),
)
"""Options that a resumed run must have in common with the original one. The number of ranks may differ."""


def algorithm_to_be(argv: Sequence[str] | None) -> Algorithm | None:
    """Return the algorithm, for `hvd.init`; None if an option is wrong, which `parse` reports."""
    parser = Parser(add_help=False, allow_abbrev=False)
    _add_algorithm(parser)
    return algorithm_among(parser, argv)


_SHORT = (
    ("group_size", "N"),
    ("interval", "N"),
    ("communicator", "WHAT"),
    ("detector", "WHAT"),
    ("threshold", "PERCENT"),
    ("granularity", "WHAT"),
)


def _add_algorithm(parser: argparse.ArgumentParser) -> None:
    add_algorithm(parser)
    for name, value in _SHORT:
        flag, short = f"--{name.replace('_', '-')}", f"{name}={{}}".format
        help = f"short for --set {name}={value}"
        parser.add_argument(flag, action="append", dest="set", type=short, metavar=value, help=help)


def parse(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """Return the options. UsageError if one is wrong."""
    parser = Parser(
        prog="train.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    _add_algorithm(parser)
    add("--data", default="digits", choices=("digits", "fashion-mnist"), help="data set (default: digits)")
    add("--data-dir", metavar="FOLDER", help="folder of Fashion-MNIST's four .gz files (default: that of Debian)")
    add("--epochs", type=int, help="passes over the training images (default: 20 for the digits, else 2)")
    add("--batch-size", type=int, default=128, help="images per step, all ranks together (default: 128)")
    add("--accumulate", type=int, default=1, metavar="N", help="parts of each rank's share of a batch (default: 1)")
    add("--recipe", default="plain", choices=tuple(RECIPES), help="large-batch: LARS, smoothed labels, a warm-up, and "
        "an --lr for 256 images that is scaled to the batch (default: plain)")  # fmt: skip
    add("--lr", type=float, help="first learning rate; falls as 1 / (1 + step / 400) (default: 0.05; large-batch: 1)")
    add("--momentum", type=float, help="momentum of the optimizer (default: 0.9; large-batch: 0.96)")
    add("--label-smoothing", type=float, metavar="E", help="share of a label's weight spread over all classes "
        "(default: 0; large-batch: 0.1)")  # fmt: skip
    add("--bfloat16", action="store_true", help="mixed precision: forward and backward in bfloat16 where torch does so")
    add("--seed", type=int, default=1, help="seed of the initial weights and of the order of the images (default: 1)")
    add("--max-steps", type=int, metavar="N", help="last step, counted from the start of the training")
    add("--checkpoint", metavar="FILE", help="checkpoint, written after each epoch and at the end; training continues "
        "from it if it exists. FOLDER/: keep two, and continue from the newest complete one")  # fmt: skip
    add("--checkpoint-every", type=int, metavar="N", help="steps between further checkpoints")
    add("--resume", action=argparse.BooleanOptionalAction, help="require a checkpoint to continue from, or ignore it")
    add("--json", metavar="FILE", help="file for the results")
    add("--log", metavar="FILE", help="file for a line of JSON per step: its number, loss, ranks, start, time")
    add("--statistics", metavar="FILE", help="file (JSON) for the statistics of caps; a plot is written next to it")
    args = parser.parse_on_each_rank(argv)
    if args.epochs is None:
        args.epochs = 20 if args.data == "digits" else 2
    for name, value in vars(RECIPES[args.recipe]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("epochs", "batch_size", "accumulate", "max_steps", "checkpoint_every"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    if args.resume is not None and not args.checkpoint:
        raise UsageError("--resume and --no-resume need --checkpoint FILE")
    if args.checkpoint_every is not None and not args.checkpoint:
        raise UsageError("--checkpoint-every needs --checkpoint FILE")
    if not 0 <= args.label_smoothing < 1:
        raise UsageError(f"--label-smoothing {args.label_smoothing}: must be at least 0 and below 1")
    if args.lr <= 0 or not 0 <= args.momentum < 1:
        raise UsageError("--lr must be above 0, and --momentum at least 0 and below 1")
    if args.statistics and args.algorithm != "caps":
        raise UsageError(f"--statistics {args.statistics}: needs --algorithm caps, not {args.algorithm}")
    for name in ("checkpoint", "json", "log", "statistics"):
        path = getattr(args, name)
        if path and hvd.rank() == 0 and not Path(path).resolve().parent.is_dir():
            raise UsageError(f"--{name} {path}: there is no folder {Path(path).resolve().parent}")
    return args
