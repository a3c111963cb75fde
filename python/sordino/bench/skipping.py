"""Parameter skipping (CaPS): what detection costs, accuracy against the bytes that are sent, and communication.

  python benchmarks/skipping.py detection             # one process, one core
  python benchmarks/skipping.py training
  python benchmarks/skipping.py communication         # as root: it makes hosts and starts the ranks by itself

Each part says more with --help.
"""

from __future__ import annotations

from collections.abc import Sequence

from sordino.bench import common, skipping_communication, skipping_detection, skipping_training

_PARTS = {
    "detection": skipping_detection.main,
    "training": skipping_training.main,
    "communication": skipping_communication.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part; what follows its name goes to it."""
    return common.run_part("skipping", __doc__, _PARTS, argv)
