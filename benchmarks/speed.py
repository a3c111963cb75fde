"""Before and now: what version 0.1 took, and what is taken today; see ways/speed.py."""

from __future__ import annotations

import sys

from ways.speed import main

if __name__ == "__main__":
    sys.exit(main())
