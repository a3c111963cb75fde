"""A training whose ranks are killed at random moments, beside an undisturbed one; see sordino.bench.soak."""

import sys
from pathlib import Path

from sordino.bench.soak import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1] / "examples" / "train.py"))
