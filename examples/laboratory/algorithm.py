"""Options of the examples that choose an algorithm: --algorithm NAME, --set NAME=VALUE and --compression CODEC."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from dataclasses import fields
from typing import NoReturn

import sordino.algorithms
import sordino.torch as hvd
from sordino.algorithms import Algorithm
from sordino.algorithms.settings import configured
from sordino.codecs import codec_of
from sordino.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Parser that raises UsageError, so that all ranks can refuse together."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")

    def parse_on_each_rank(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Return the options, with the current name of the algorithm. Only rank 0 prints --help.

        Raises:
            UsageError: an option is unknown or invalid, there is no such algorithm, or it refuses a setting.
        """
        with contextlib.redirect_stdout(io.StringIO()) if hvd.rank() else contextlib.nullcontext():
            args = self.parse_args(argv)
        args.algorithm = sordino.algorithms.current_name(args.algorithm)
        names = sordino.algorithms.names()
        if args.algorithm not in names and ":" not in args.algorithm:
            raise UsageError(f"--algorithm {args.algorithm}: unknown; use one of {', '.join(names)}, or module:Class")
        algorithm_of(args)
        compression_of(args)
        return args


def add_algorithm(parser: argparse.ArgumentParser) -> None:
    """Declare --algorithm and --set."""
    add, names = parser.add_argument, sordino.algorithms.names()
    add("--algorithm", default="allreduce", metavar="NAME", help=f"one of: {', '.join(names)} (default: allreduce)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, such as group_size=2")
    about = (
        "codec of the values that are sent, such as int8: compression= of the algorithm if it has that setting, else "
        "of DistributedOptimizer (default: none)"
    )
    add("--compression", metavar="CODEC", help=about)


def algorithm_of(args: argparse.Namespace) -> Algorithm:
    """Return the algorithm of --algorithm with the settings of --set, and with --compression if it has that setting.

    Raises:
        UsageError: it has no such setting, or the value is invalid.
    """
    kind, settings = sordino.algorithms.class_of(args.algorithm), list(args.set)
    if args.compression is not None and _has_compression(kind):
        if any(one.partition("=")[0].strip() == "compression" for one in settings):
            raise UsageError(
                f"--compression {args.compression} and --set compression=... are the same. Use one of them"
            )
        settings.append(f"compression={args.compression}")
    return configured(kind, args.algorithm, settings)


def compression_of(args: argparse.Namespace) -> str:
    """Return `compression=` of DistributedOptimizer: --compression, or "none" if the algorithm has that setting."""
    if args.compression is None or _has_compression(sordino.algorithms.class_of(args.algorithm)):
        return "none"
    codec_of(args.compression, "--compression")
    return str(args.compression)


def _has_compression(kind: type[Algorithm]) -> bool:
    return any(one.name == "compression" for one in fields(kind))


def algorithm_among(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> Algorithm | None:
    """Return the algorithm, for `hvd.init`; None if an option is wrong, which the parser of all options reports."""
    try:
        return algorithm_of(parser.parse_known_args(argv)[0])
    except UsageError:
        return None
