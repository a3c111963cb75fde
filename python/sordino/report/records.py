"""Records of results: a JSON file, and the Markdown and the picture next to it, made from that file only."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.errors import UsageError
from sordino.report import Results, pictures


@dataclass(frozen=True)
class Report:
    """Functions that make the report of one benchmark from its results.

    Attributes:
        markdown: returns the complete text.
        draw: draws the picture into a figure of matplotlib.
    """

    markdown: Callable[[Results], str]
    draw: Callable[[Results, Any], None]


Reports = Mapping[str, Report]
"""Reports by the name under "benchmark" in the results."""


def make_folder(folder: Path) -> None:
    """Make the folder for results, before they are measured.

    Raises:
        UsageError: it cannot be made, or no file can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{folder}: results cannot be written there: {error.strerror}; name another folder") from error


def write(results: Results, folder: Path | None) -> Path | None:
    """Write the JSON file atomically, and return its path; None without a folder.

    Raises:
        UsageError: it cannot be written.
    """
    if folder is None:
        return None
    make_folder(folder)
    path = folder / f"{results['name']}.json"
    half = path.with_suffix(".json.part")
    try:
        half.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def render(path: Path, reports: Reports) -> list[Path]:
    """Write the Markdown and, if matplotlib is installed, the PNG next to a JSON file. Return the files written.

    Raises:
        UsageError: the file is not a result of one of these benchmarks.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from error
    benchmark = results.get("benchmark") if isinstance(results, dict) else None
    if not isinstance(benchmark, str) or benchmark not in reports:
        raise UsageError(f"{path} is not a result of a benchmark")
    try:
        written = reports[benchmark].markdown(results)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is no complete result of the benchmark {benchmark} ({what}); run it again") from error
    text = path.with_suffix(".md")
    text.write_text(written + "\n", encoding="utf-8")
    picture = path.with_suffix(".png")
    if not pictures.draw(reports[benchmark].draw, results, picture):
        log(f"no {picture.name}: matplotlib is not installed (pip install matplotlib)")
        return [text]
    return [text, picture]


def publish(results: Results, folder: Path | None, reports: Reports) -> None:
    """Print a report. If there is a folder, also write the JSON file and the files made from it."""
    print(reports[results["benchmark"]].markdown(results), flush=True)
    save(results, folder, reports)


def save(results: Results, folder: Path | None, reports: Reports) -> None:
    """If there is a folder, write the JSON file and the files made from it."""
    path = write(results, folder)
    if path is not None:
        written = [path, *render(path, reports)]
        log(f"written: {', '.join(str(one) for one in written)}")


def log(line: str) -> None:
    """Print progress on stderr, separate from the report on stdout."""
    print(line, file=sys.stderr, flush=True)
