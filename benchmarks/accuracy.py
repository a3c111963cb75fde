"""Test accuracy of gossip and AllReduce by mini-batch and by workers; see sordino.bench.accuracy."""

import sys

from sordino.bench.accuracy import main

if __name__ == "__main__":
    sys.exit(main())
