"""Gossip: exchanges, finding peers, and scaling over slow links; see sordino.bench.gossip."""

import sys

from sordino.bench.gossip import main

if __name__ == "__main__":
    sys.exit(main())
