"""What all benchmarks share: what is known of the machine, options, targets, and the JSON, Markdown and PNG files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import sordino
from sordino._core import build_info, kernels
from sordino.errors import UsageError

Results = dict[str, Any]

BUSY = 0.1  # cores that others may use before numbers are doubtful
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}


# ---- options -------------------------------------------------------------------------------------------------------


def parser(program: str, description: str | None, budget: float, unit: str) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    options = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--results", type=Path, metavar="DIR", help="where to write (default: benchmarks/results, else results)"
    )
    options.add_argument(
        "--budget", type=float, default=budget, metavar="S", help=f"seconds a {unit} (default {budget:g})"
    )
    options.add_argument("--quick", action="store_true", help="a short try; writes nothing unless --results says where")
    return options


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


def results_folder(options: argparse.Namespace) -> Path | None:
    """Where the files go; None if none are to be written."""
    if options.results is not None:
        return Path(options.results)
    if options.quick:
        return None
    usual = Path("benchmarks/results")
    return usual if usual.parent.is_dir() else Path("results")


def parse_bytes(text: str) -> int:
    """4096, 4k, 4KiB, 64MiB and the like. UsageError for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        raise UsageError(f"'{text}' is not a size; expected something like 65536, 64KiB or 4MiB")
    return int(match[1]) * _UNITS[match[2]]


def format_bytes(count: int) -> str:
    """The size in the largest unit that keeps it whole."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """With three digits, in the unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


# ---- the machine ---------------------------------------------------------------------------------------------------


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def machine(mpi_library: str | None) -> Results:
    """What the numbers depend on, as far as it can be told. Holds no host name and no path."""
    info = build_info()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_per_rank": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sordino": sordino.__version__,
        "compiler": info["compiler"],
        "instruction_set": kernels.level(),
        "mpi": without_paths(mpi_library or "no MPI"),
    }


def without_paths(text: str) -> str:
    """The text with every absolute path cut down to its last part: results are made to be shared."""
    return re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", text)


def describe_machine(found: Results) -> str:
    """One paragraph for the head of a report."""
    return (
        f"{found['cpu']}, {found['cores']} cores of which a rank may use "
        f"{found['cores_per_rank']} ({found['instruction_set']} kernels), {found['kernel']}, Python "
        f"{found['python']}, torch {found['torch']}, Sordino {found['sordino']}, {found['mpi']}; {found['date']}"
        f"{describe_others(found['others'])}."
    )


def describe_others(cores: float | None) -> str:
    """How much other processes disturbed a measurement, as the end of a sentence; nothing if it is not known."""
    if cores is None:
        return ""
    warning = ": **a busy machine, take the numbers with care**" if cores > BUSY else ""
    return f"; other processes used {cores:.2f} cores{warning}"


# ---- what was measured, and targets ----------------------------------------------------------------------------------


def ratio(row: Results, over: str, under: str) -> float | None:
    """How many times longer `over` took than `under`; None if one was not measured."""
    entries = row["contestants"]
    if over not in entries or under not in entries:
        return None
    return float(entries[over]["median"] / entries[under]["median"])


def target(what: str, value: float | None, limit: float, at_least: bool) -> Results:
    """A requirement and what was measured. `value` is None where the other side was not found."""
    met = None if value is None else bool(value >= limit if at_least else value <= limit)
    return {"what": what, "value": value, "limit": limit, "at_least": at_least, "met": met}


def target_table(targets: Iterable[Results], unit: str = "×") -> str:
    """Every target with its verdict, in plain words."""
    verdicts = {True: "met", False: "**missed**", None: "not measured"}
    rows = []
    for one in targets:
        sign = "≥" if one["at_least"] else "≤"
        value = "–" if one["value"] is None else f"{one['value']:.3g}{unit}"
        rows.append([one["what"], f"{sign} {one['limit']:g}{unit}", value, verdicts[one["met"]]])
    return table(["Target", "Required", "Measured", "Verdict"], rows)


def opening(results: Results, title: str, what: str) -> list[str]:
    """What every report begins with: what was measured, and where."""
    notes = "; ".join(f"{name} {note}" for name, note in results.get("baselines", {}).items())
    blocks = [f"# {title}", what, f"Machine: {describe_machine(results['machine'])}"]
    return [*blocks, f"Baselines: {notes}."] if notes else blocks


def head(
    results: Results, title: str, what: str, unit: str = "×", labels: Mapping[str, str] | None = None
) -> list[str]:
    """That, what was wrong (by these labels, if any), and the targets."""
    wrong = ", ".join((labels or {}).get(name, name) for name in results.get("wrong", []))
    blocks = opening(results, title, what) + ([f"**Wrong results: {wrong}.**"] if wrong else [])
    return [*blocks, "## Targets", target_table(results["targets"], unit)] if "targets" in results else blocks


# ---- files ---------------------------------------------------------------------------------------------------------


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that reads well in a terminal too. The first column is text, the others numbers."""
    lines = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]

    def padded(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return f"| {' | '.join(cells)} |"

    rule = ["-" * width if not k else "-" * (width - 1) + ":" for k, width in enumerate(widths)]
    return "\n".join([padded(lines[0]), padded(rule), *map(padded, lines[1:])])


def write(results: Results, folder: Path | None) -> Path | None:
    """Writes the JSON file, whole or not at all, and returns its path."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results['name']}.json"
    half = path.with_suffix(".json.part")
    half.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    half.replace(path)
    return path


def log(line: str) -> None:
    """Progress, apart from the report on stdout."""
    print(line, file=sys.stderr, flush=True)
