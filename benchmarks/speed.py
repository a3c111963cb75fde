"""The required speeds and the measured ones; see ways/speed.py."""

from __future__ import annotations

import sys

from ways.speed import main

if __name__ == "__main__":
    sys.exit(main())
