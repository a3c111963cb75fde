"""Settles what the five papers claim: a claim is one figure, one table or one headline sentence.

  python -m benchmarks.claims list
  python -m benchmarks.claims run crossover-figure-7      # or several names, or a paper's, or all
  python -m benchmarks.claims run all --quick             # every claim in small, judged by nobody
  python -m benchmarks.claims report                      # docs/claims.md and its pictures, from the committed JSON

Runs are kept in build/claims until the file of their claim is written: an interrupted command goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # where the benchmarks find each other's modules

from claims import catalogue, page, running  # noqa: E402
from claims.claim import Claim  # noqa: E402
from sordino.errors import SordinoError, UsageError  # noqa: E402
from sordino.pool import pool  # noqa: E402
from sordino.report import records  # noqa: E402
from sordino.report.tables import table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "claims"
KEPT = ROOT / "build" / "claims"


def chosen(names: Sequence[str]) -> list[Claim]:
    """Return the claims of these names; a paper's name stands for all of its claims, and "all" for all.

    Raises:
        UsageError: there is no such claim.
    """
    found: dict[str, Claim] = {}
    for name in names:
        some = [one for one in catalogue.CLAIMS if name in (one.name, one.paper.name, "all")]
        if not some:
            known = ", ".join([*catalogue.PAPERS, *(one.name for one in catalogue.CLAIMS)])
            raise UsageError(f"no claim is called '{name}'; there are: all, {known}")
        found |= {one.name: one for one in some}
    return list(found.values())


def run(claims: Sequence[Claim], quick: bool, jobs: int) -> None:
    """Settle these claims; in small if `quick`, and then nothing is kept."""
    with tempfile.TemporaryDirectory() as temporary, pool(jobs) as processes:
        runner = running.Runner(Path(temporary) if quick else KEPT, processes)
        for claim in claims:
            begin = time.monotonic()
            path = RESULTS / f"{claim.name}.json"
            found, entries = runner.settle(claim, quick, {} if quick else running.read(path))
            if not quick:
                running.write(path, claim, entries)
            print(page.evidence_table(found.evidence), flush=True)
            records.log(f"{claim.name}: {found.evidence[0].verdict}; {time.monotonic() - begin:.0f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Status 1 for what it cannot do."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="all claims, and what is known of them")
    one = commands.add_parser("run", help="settle claims")
    one.add_argument("names", nargs="+", metavar="NAME", help="a claim, a paper, or all")
    one.add_argument("--quick", action="store_true", help="in small, to see that it works; writes nothing")
    one.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="runs at a time (one a core)")
    commands.add_parser("report", help="make docs/claims.md and its pictures from the committed JSON")
    options = parser.parse_args(argv)
    try:
        if options.command == "list":
            rows = [
                [claim.name, claim.paper.name, claim.place, page.verdict_of(claim, RESULTS)]
                for claim in catalogue.CLAIMS
            ]
            print(table(["Claim", "Paper", "Place", "Verdict"], rows))
        elif options.command == "run":
            if options.jobs < 1:
                raise UsageError(f"--jobs {options.jobs}: at least one run at a time")
            run(chosen(options.names), options.quick, options.jobs)
        else:
            records.log(f"written: {page.publish(RESULTS, ROOT / 'docs')}")
    except SordinoError as error:
        records.log(f"claims: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
