"""Parameter skipping: what detection costs, accuracy against bytes, and communication; see sordino.bench.skipping."""

import sys

from sordino.bench.skipping import main

if __name__ == "__main__":
    sys.exit(main())
