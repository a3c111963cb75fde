"""Gossip: what one exchange takes, what finding a peer takes, and how training scales over slow links.

  mpirun -np 2 python benchmarks/gossip.py exchange
  python benchmarks/gossip.py topology
  python benchmarks/gossip.py cluster        # as root: it makes the hosts and starts the ranks by itself

Each part says more with --help.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sordino.bench import gossip_cluster, gossip_exchange, gossip_topology

_PARTS = {
    "exchange": gossip_exchange.main,
    "topology": gossip_topology.main,
    "cluster": gossip_cluster.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part; what follows its name goes to it."""
    options = argparse.ArgumentParser(
        prog="gossip", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("part", choices=_PARTS, help="which part")
    options.add_argument("arguments", nargs=argparse.REMAINDER, help="for the part (--help lists them)")
    chosen = options.parse_args(argv)
    return _PARTS[chosen.part](chosen.arguments)
