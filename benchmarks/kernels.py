"""The CPU kernels against copies of the same bytes; see sordino.bench.kernels."""

import sys

from sordino.bench.kernels import main

if __name__ == "__main__":
    sys.exit(main())
