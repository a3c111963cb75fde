"""Options of the examples that choose an algorithm and its settings: --algorithm NAME and --set NAME=VALUE."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from typing import NoReturn

import sordino.algorithms
import sordino.torch as hvd
from sordino.algorithms import Algorithm
from sordino.algorithms.settings import configured
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
        return args


def add_algorithm(parser: argparse.ArgumentParser) -> None:
    """Declare --algorithm and --set."""
    add, names = parser.add_argument, sordino.algorithms.names()
    add("--algorithm", default="allreduce", metavar="NAME", help=f"one of: {', '.join(names)} (default: allreduce)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, such as group_size=2")


def algorithm_of(args: argparse.Namespace) -> Algorithm:
    """Return the algorithm of --algorithm with the settings of --set.

    Raises:
        UsageError: it has no such setting, or the value is invalid.
    """
    return configured(sordino.algorithms.class_of(args.algorithm), args.algorithm, args.set)


def algorithm_among(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> Algorithm | None:
    """Return the algorithm, for `hvd.init`; None if an option is wrong, which the parser of all options reports."""
    try:
        return algorithm_of(parser.parse_known_args(argv)[0])
    except UsageError:
        return None
