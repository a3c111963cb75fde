"""The ways to start ranks and to reach other machines, side by side: MPI, UCX, what one machine needs, and Gloo.

  python benchmarks/transports.py allreduce           # as root: it makes hosts and starts the ranks by itself
  python benchmarks/transports.py start
  python benchmarks/transports.py loss                # as root, too

Each part says more with --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from timings import parts
from timings.transports import allreduce, loss, start

_PARTS = {"allreduce": allreduce.main, "start": start.main, "loss": loss.main}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part; what follows its name goes to it."""
    return parts.run_part("transports", __doc__, _PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
