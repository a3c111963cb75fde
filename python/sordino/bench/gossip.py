"""Gossip: what one exchange takes, what finding a peer takes, and how training scales over slow links.

  mpirun -np 2 python benchmarks/gossip.py exchange
  python benchmarks/gossip.py topology
  python benchmarks/gossip.py cluster        # as root: it makes the hosts and starts the ranks by itself

Each part says more with --help.
"""

from __future__ import annotations

from collections.abc import Sequence

from sordino.bench import common, gossip_cluster, gossip_exchange, gossip_topology

_PARTS = {
    "exchange": gossip_exchange.main,
    "topology": gossip_topology.main,
    "cluster": gossip_cluster.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part; what follows its name goes to it."""
    return common.run_part("gossip", __doc__, _PARTS, argv)
