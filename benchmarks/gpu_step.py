"""What DistributedOptimizer adds to a step on one GPU; see sordino.bench.gpu_step."""

import sys

from sordino.bench.gpu_step import main

if __name__ == "__main__":
    sys.exit(main())
