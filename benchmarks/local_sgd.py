"""Local SGD: communication, PyTorch's own beside it, accuracy, and predictions; see sordino.bench.local_sgd."""

import sys

from sordino.bench.local_sgd import main

if __name__ == "__main__":
    sys.exit(main())
