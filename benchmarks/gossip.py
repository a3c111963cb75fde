"""Gossip: time of one exchange, and time to find peers.

  mpirun -np 2 python benchmarks/gossip.py exchange
  python benchmarks/gossip.py topology

Each part has its own --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from timings import parts
from timings.gossip import exchange, topology

_PARTS = {
    "exchange": exchange.main,
    "topology": topology.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part with the arguments after its name; return its exit status."""
    return parts.run_part("gossip", __doc__, _PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
