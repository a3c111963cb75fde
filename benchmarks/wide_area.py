"""Wide-area gossip: pulls, serving, one-sided MPI beside it, and the source's tables; see sordino.bench.wide_area."""

import sys

from sordino.bench.wide_area import main

if __name__ == "__main__":
    sys.exit(main())
