"""Make Markdown and PNG from the JSON files of benchmarks, so that tables and plots agree with the measured values.

python benchmarks/report.py benchmarks/results/kernels.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from drills.report import REPORTS as DRILLS
from gpu.kernels_report import REPORTS as GPU_KERNELS
from gpu.ranks_report import REPORTS as GPU_RANKS
from gpu.step_report import REPORTS as GPU_STEP
from sordino.bench.report import REPORTS as BENCH
from sordino.errors import UsageError
from sordino.plan.report import REPORTS as PLAN
from sordino.report import records
from timings.frontier import REPORTS as FRONTIER
from timings.fsdp import REPORTS as FSDP
from timings.gossip.report import REPORTS as GOSSIP
from timings.joining import REPORTS as JOINING
from timings.layered.report import REPORTS as LAYERED
from timings.local_sgd.report import REPORTS as LOCAL_SGD
from timings.scale import REPORTS as SCALE
from timings.scheduled_pull.report import REPORTS as SCHEDULED_PULL
from timings.soak_joins import REPORTS as SOAK_JOINS
from timings.transports.cache_lines import REPORTS as CACHE_LINES
from timings.transports.recording import REPORTS as RECORDING
from timings.transports.report import REPORTS as TRANSPORTS
from timings.transports.single_copy import REPORTS as SINGLE_COPY

REPORTS = {
    **BENCH,
    **PLAN,
    **FSDP,
    **GOSSIP,
    **LAYERED,
    **LOCAL_SGD,
    **SCHEDULED_PULL,
    **DRILLS,
    **GPU_KERNELS,
    **GPU_RANKS,
    **GPU_STEP,
    **TRANSPORTS,
    **RECORDING,
    **SINGLE_COPY,
    **CACHE_LINES,
    **FRONTIER,
    **JOINING,
    **SCALE,
    **SOAK_JOINS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the reports of the given files again. Status 1 if a file is not a result of a benchmark."""
    parser = argparse.ArgumentParser(
        prog="report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="RESULTS.json")
    status = 0
    for path in parser.parse_args(argv).files:
        try:
            records.log(f"written: {', '.join(str(one) for one in records.render(path, REPORTS))}")
        except UsageError as error:
            records.log(f"report: {error}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
