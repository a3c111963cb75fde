"""Makes the Markdown and PNG files again from the JSON results; see sordino.bench.report."""

import sys

from sordino.bench.report import main

if __name__ == "__main__":
    sys.exit(main())
