"""Wide-area gossip: what steps wait, what serving costs, beside MPI's one-sided, and the source's tables simulated.

  python benchmarks/wide_area.py pulls                # as root: it makes hosts and starts the ranks by itself
  python benchmarks/wide_area.py serving              # as root, too
  python benchmarks/wide_area.py one_sided            # as root, too
  python benchmarks/wide_area.py tables

Each part says more with --help.
"""

from __future__ import annotations

from collections.abc import Sequence

from sordino.bench import common, wide_area_one_sided, wide_area_pulls, wide_area_serving, wide_area_tables

_PARTS = {
    "pulls": wide_area_pulls.main,
    "serving": wide_area_serving.main,
    "one_sided": wide_area_one_sided.main,
    "tables": wide_area_tables.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part; what follows its name goes to it."""
    return common.run_part("wide_area", __doc__, _PARTS, argv)
