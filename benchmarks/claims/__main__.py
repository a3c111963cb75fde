"""Test the claims of five papers, and our own. A claim is one figure, one table or one headline sentence.

  python -m benchmarks.claims list
  python -m benchmarks.claims run crossover-figure-7      # also several names, a paper's name, or all
  python -m benchmarks.claims run all --quick             # small runs of every claim; writes nothing
  python -m benchmarks.claims report                      # write pages and pictures from the committed JSON

Finished runs are kept in build/claims, so an interrupted command continues where it stopped.
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
sys.path.insert(0, str(ROOT / "benchmarks"))  # so that benchmarks can import each other

from claims import catalogue, page, running  # noqa: E402
from claims.claim import Claim  # noqa: E402
from sordino.errors import SordinoError, UsageError  # noqa: E402
from sordino.pool import pool  # noqa: E402
from sordino.report import records  # noqa: E402
from sordino.report.tables import table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "claims"
KEPT = ROOT / "build" / "claims"


def chosen(names: Sequence[str]) -> list[Claim]:
    """Return the claims with these names. A paper's name selects all of its claims, "all" selects every claim.

    Raises:
        UsageError: one of the names selects no claim.
    """
    found: dict[str, Claim] = {}
    for name in names:
        some = [one for one in catalogue.CLAIMS if name in (one.name, one.paper.name, "all")]
        if not some:
            known = ", ".join([*catalogue.PAPERS, *(one.name for one in catalogue.CLAIMS)])
            raise UsageError(f"no claim is called '{name}'; known names: all, {known}")
        found |= {one.name: one for one in some}
    return list(found.values())


def run(claims: Sequence[Claim], quick: bool, jobs: int) -> None:
    """Carry out the runs of these claims, write their files (unless `quick`), and print the evidence."""
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
    """Run the command, and return its exit status: 1 for a SordinoError."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list all claims with their verdicts")
    one = commands.add_parser("run", help="carry out the runs of claims")
    one.add_argument("names", nargs="+", metavar="NAME", help="name of a claim or a paper, or all")
    one.add_argument("--quick", action="store_true", help="in small, to see that it works; write nothing")
    one.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of runs at a time (default: one per core)",
    )
    commands.add_parser("report", help="write the pages and pictures from the committed JSON")
    options = parser.parse_args(argv)
    try:
        if options.command == "list":
            rows = [[one.name, one.paper.name, one.place, page.verdict_of(one, RESULTS)] for one in catalogue.CLAIMS]
            print(table(["Claim", "Paper", "Place", "Verdict"], rows))
        elif options.command == "run":
            if options.jobs < 1:
                raise UsageError(f"--jobs {options.jobs}: must be at least 1")
            run(chosen(options.names), options.quick, options.jobs)
        else:
            records.log(f"written: {page.publish(RESULTS, ROOT / 'docs')}")
    except SordinoError as error:
        records.log(f"claims: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
