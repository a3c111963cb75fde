"""Hierarchical local SGD: communication in a step, its overlap with loading, PyTorch's local SGD, predictions.

  python benchmarks/local_sgd.py communication        # as root: it makes hosts and starts the ranks by itself
  python benchmarks/local_sgd.py overlap              # as root
  python benchmarks/local_sgd.py torch                # as root
  python benchmarks/local_sgd.py plan                 # as root

Each part has its own --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from timings import parts
from timings.local_sgd import beside_torch, communication, overlap, plan

_PARTS = {
    "communication": communication.main,
    "overlap": overlap.main,
    "torch": beside_torch.main,
    "plan": plan.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part with the arguments after its name; return its exit status."""
    return parts.run_part("local_sgd", __doc__, _PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
