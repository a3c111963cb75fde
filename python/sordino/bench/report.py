"""Markdown and PNG from the JSON files of the benchmarks, so that tables and plots always come from what was measured.

python benchmarks/report.py benchmarks/results/collectives.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sordino.bench import (
    accuracy_report,
    common,
    gossip_report,
    gpu_kernels_report,
    gpu_ranks_report,
    gpu_step_report,
    layered_report,
    local_sgd_report,
    pictures,
    skipping_report,
    soak_report,
    tables,
    wide_area_report,
)
from sordino.bench.common import Results
from sordino.errors import UsageError
from sordino.tune import report as plan_report

_TABLES: dict[str, Callable[[Results], str]] = {
    "accuracy": accuracy_report.report,
    "collectives": tables.collectives,
    "fusion": tables.fusion,
    "gossip_cluster": gossip_report.cluster,
    "gossip_exchange": gossip_report.exchange,
    "gossip_topology": gossip_report.topology,
    "gpu_kernels": gpu_kernels_report.report,
    "gpu_ranks": gpu_ranks_report.report,
    "gpu_step": gpu_step_report.report,
    "kernels": tables.kernels,
    "layered": layered_report.report,
    "local_sgd_accuracy": local_sgd_report.accuracy,
    "local_sgd_communication": local_sgd_report.communication,
    "local_sgd_plan": local_sgd_report.plan,
    "local_sgd_torch": local_sgd_report.against_torch,
    "plan": plan_report.markdown,
    "skipping_communication": skipping_report.communication,
    "skipping_detection": skipping_report.detection,
    "skipping_training": skipping_report.training,
    "soak": soak_report.report,
    "wide_area_one_sided": wide_area_report.one_sided,
    "wide_area_pulls": wide_area_report.pulls,
    "wide_area_serving": wide_area_report.serving,
    "wide_area_tables": wide_area_report.tables,
}
_PICTURES: dict[str, Callable[[Results, Any], None]] = {
    "accuracy": accuracy_report.picture,
    "collectives": pictures.collectives,
    "fusion": pictures.fusion,
    "gossip_cluster": gossip_report.draw_cluster,
    "gossip_exchange": gossip_report.draw_exchange,
    "gossip_topology": gossip_report.draw_topology,
    "gpu_kernels": gpu_kernels_report.draw,
    "gpu_ranks": gpu_ranks_report.draw,
    "gpu_step": gpu_step_report.draw,
    "kernels": pictures.kernels,
    "layered": layered_report.draw,
    "local_sgd_accuracy": local_sgd_report.draw_accuracy,
    "local_sgd_communication": local_sgd_report.draw_communication,
    "local_sgd_plan": local_sgd_report.draw_plan,
    "local_sgd_torch": local_sgd_report.draw_torch,
    "plan": plan_report.draw,
    "skipping_communication": skipping_report.draw_communication,
    "skipping_detection": skipping_report.draw_detection,
    "skipping_training": skipping_report.draw_training,
    "soak": soak_report.draw,
    "wide_area_one_sided": wide_area_report.draw_one_sided,
    "wide_area_pulls": wide_area_report.draw_pulls,
    "wide_area_serving": wide_area_report.draw_serving,
    "wide_area_tables": wide_area_report.draw_tables,
}


def markdown(results: Results) -> str:
    """The whole report of one benchmark."""
    return _TABLES[results["benchmark"]](results)


def render(path: Path) -> list[Path]:
    """Writes the Markdown and, where matplotlib is installed, the PNG beside a JSON file; returns what was written.

    Raises:
        UsageError: the file is not one of ours.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from error
    kind = results.get("benchmark") if isinstance(results, dict) else None
    if not isinstance(kind, str) or kind not in _TABLES:
        raise UsageError(f"{path} is not a result of sordino bench")
    try:
        written = markdown(results)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is no complete result of sordino bench {kind} ({what}); run it again") from error
    text = path.with_suffix(".md")
    text.write_text(written + "\n", encoding="utf-8")
    picture = path.with_suffix(".png")
    if not pictures.draw(_PICTURES[results["benchmark"]], results, picture):
        common.log(f"no {picture.name}: matplotlib is not installed (pip install matplotlib)")
        return [text]
    return [text, picture]


def publish(results: Results, folder: Path | None) -> None:
    """Prints a report and, if there is a folder, writes the JSON file and what is made of it."""
    print(markdown(results), flush=True)
    save(results, folder)


def save(results: Results, folder: Path | None) -> None:
    """Writes, if there is a folder, the JSON file and what is made of it."""
    path = common.write(results, folder)
    if path is not None:
        written = [path, *render(path)]
        common.log(f"written: {', '.join(str(one) for one in written)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the reports of the given files again. Status 1 if a file is not one of ours."""
    parser = argparse.ArgumentParser(
        prog="report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="RESULTS.json")
    status = 0
    for path in parser.parse_args(argv).files:
        try:
            common.log(f"written: {', '.join(str(one) for one in render(path))}")
        except UsageError as error:
            common.log(f"report: {error}")
            status = 1
    return status
