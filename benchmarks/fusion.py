"""Communication that DistributedOptimizer leaves exposed in a training step; see sordino.bench.fusion."""

import sys

from sordino.bench.fusion import main

if __name__ == "__main__":
    sys.exit(main())
