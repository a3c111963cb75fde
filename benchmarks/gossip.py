"""Gossip: what one exchange takes, what finding a peer takes, and how training scales over slow links.

  mpirun -np 2 python benchmarks/gossip.py exchange
  python benchmarks/gossip.py topology
  python benchmarks/gossip.py cluster        # as root: it makes the hosts and starts the ranks by itself

Each part says more with --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from claims import parts
from claims.gossip import cluster, exchange, topology

_PARTS = {
    "exchange": exchange.main,
    "topology": topology.main,
    "cluster": cluster.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part; what follows its name goes to it."""
    return parts.run_part("gossip", __doc__, _PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
