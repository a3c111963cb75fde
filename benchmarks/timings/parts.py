"""Benchmarks of several parts, each with options of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

Parts = Mapping[str, Callable[[Sequence[str]], int]]


def run_part(program: str, description: str | None, parts: Parts, argv: Sequence[str] | None) -> int:
    """Runs the part of a benchmark that is named first; what follows its name goes to it. Returns its exit status."""
    options = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("part", choices=parts, help="which part")
    options.add_argument("arguments", nargs=argparse.REMAINDER, help="for the part (--help lists them)")
    chosen = options.parse_args(argv)
    return parts[chosen.part](chosen.arguments)
