"""Averaging between ranks that share a GPU; see sordino.bench.gpu_ranks."""

import sys

from sordino.bench.gpu_ranks import main

if __name__ == "__main__":
    sys.exit(main())
