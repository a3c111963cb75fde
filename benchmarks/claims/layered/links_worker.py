"""One rank that measures its links; rank 0 prints the rates as a line of JSON."""

from __future__ import annotations

import argparse
import math

from cluster import jobs
from sordino import plan
from sordino.bench.resnet import resnet50_shapes
from sordino.report import Results


def measure(budget: float) -> Results:
    """Measure the rates of the transport here. Collective."""
    count = 4 * sum(math.prod(shape) for _, shape in resnet50_shapes())
    return {"rates": plan.measure(count, budget)[0].as_results()}


def main() -> int:
    """Run on all ranks."""
    options = argparse.ArgumentParser(prog="links_worker", description=__doc__)
    options.add_argument("--budget", type=float, required=True, metavar="S", help="seconds")
    chosen = options.parse_args()
    return jobs.work(lambda _: measure(chosen.budget))


if __name__ == "__main__":
    raise SystemExit(main())
