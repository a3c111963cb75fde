"""Benchmarks of several parts, each with its own options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

Parts = Mapping[str, Callable[[Sequence[str]], int]]


def run_part(program: str, description: str | None, parts: Parts, argv: Sequence[str] | None) -> int:
    """Run the part that the first argument names, with the arguments after it; return its exit status."""
    options = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("part", choices=parts, help="name of the part")
    options.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the part (--help lists them)")
    chosen = options.parse_args(argv)
    return parts[chosen.part](chosen.arguments)
