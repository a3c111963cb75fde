"""Sordino's all-reduce against MPI, Gloo, Horovod and the memory floor; see sordino.bench.collectives."""

import sys

from sordino.bench.collectives import main

if __name__ == "__main__":
    sys.exit(main())
