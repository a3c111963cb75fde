"""Comparison of launchers and transports: MPI, UCX, shared memory on one machine, and Gloo.

  python benchmarks/transports.py allreduce           # as root: it makes hosts and starts the ranks by itself
  python benchmarks/transports.py start
  python benchmarks/transports.py loss                # as root

Each part has its own --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from timings import parts
from timings.transports import allreduce, loss, start

_PARTS = {"allreduce": allreduce.main, "start": start.main, "loss": loss.main}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part with the arguments after its name; return its exit status."""
    return parts.run_part("transports", __doc__, _PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
