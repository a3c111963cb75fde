"""Entry point of `python -m sordino.cli`, which is the command `sordino`."""

from __future__ import annotations

import sys

from sordino.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
