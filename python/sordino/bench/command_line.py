"""Options that the benchmarks share."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from sordino.errors import UsageError

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}


def parser(
    program: str, description: str | None, budget: float | None = None, unit: str = ""
) -> argparse.ArgumentParser:
    """Return an argument parser with the shared options. Without a budget it has no --budget."""
    options = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--results", type=Path, metavar="DIR", help="folder for results (default: benchmarks/results, else results)"
    )
    if budget is not None:
        options.add_argument(
            "--budget", type=float, default=budget, metavar="S", help=f"seconds per {unit} (default {budget:g})"
        )
    options.add_argument("--quick", action="store_true", help="run briefly; write no files without --results")
    return options


def results_folder(options: argparse.Namespace) -> Path | None:
    """Return the folder of the files; None if no files are written."""
    if options.results is not None:
        return Path(options.results)
    if options.quick:
        return None
    usual = Path("benchmarks/results")
    return usual if usual.parent.is_dir() else Path("results")


def parse_mbps(text: str) -> float:
    """Return the Mbps of a rate such as 10gbit, 2.5gbit or 100mbit. UsageError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([gm])bit", text.lower())
    if match is None:
        raise UsageError(f"'{text}' is not a rate; expected something like 10gbit or 100mbit")
    return float(match[1]) * (1000 if match[2] == "g" else 1)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as 4096, 4k, 4KiB or 64MiB. UsageError for any other text."""
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        raise UsageError(f"'{text}' is not a size; expected something like 65536, 64KiB or 4MiB")
    return int(match[1]) * _UNITS[match[2]]
