"""Parameter skipping (CaPS): what detection costs, accuracy against the bytes that are sent, and communication.

  python benchmarks/skipping.py detection             # one process, one core
  python benchmarks/skipping.py training
  python benchmarks/skipping.py communication         # as root: it makes hosts and starts the ranks by itself

Each part says more with --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from claims import parts
from claims.skipping import communication, detection, training

_PARTS = {
    "detection": detection.main,
    "training": training.main,
    "communication": communication.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part; what follows its name goes to it."""
    return parts.run_part("skipping", __doc__, _PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
