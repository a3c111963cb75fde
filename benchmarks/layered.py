"""Layered SGD: exposed communication while batches are loaded, and scaling; see sordino.bench.layered."""

import sys

from sordino.bench.layered import main

if __name__ == "__main__":
    sys.exit(main())
