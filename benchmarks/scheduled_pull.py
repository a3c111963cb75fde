"""Scheduled pull gossip: waiting of steps, cost of serving pulls, and comparison with MPI's one-sided communication.

  python benchmarks/scheduled_pull.py pulls                # as root: it makes hosts and starts the ranks by itself
  python benchmarks/scheduled_pull.py serving              # as root
  python benchmarks/scheduled_pull.py one_sided            # as root

Each part has its own --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from timings import parts
from timings.scheduled_pull import one_sided, pulls, serving

_PARTS = {
    "pulls": pulls.main,
    "serving": serving.main,
    "one_sided": one_sided.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part with the arguments after its name; return its exit status."""
    return parts.run_part("scheduled_pull", __doc__, _PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
