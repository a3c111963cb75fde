"""Hierarchical local SGD: communication in a step, PyTorch's own local SGD beside it, accuracy, and predictions.

  python benchmarks/local_sgd.py communication        # as root: it makes hosts and starts the ranks by itself
  python benchmarks/local_sgd.py torch                # as root, too
  python benchmarks/local_sgd.py accuracy
  python benchmarks/local_sgd.py plan                 # as root, too

Each part says more with --help.
"""

from __future__ import annotations

from collections.abc import Sequence

from sordino.bench import common, local_sgd_accuracy, local_sgd_communication, local_sgd_plan, local_sgd_torch

_PARTS = {
    "communication": local_sgd_communication.main,
    "torch": local_sgd_torch.main,
    "accuracy": local_sgd_accuracy.main,
    "plan": local_sgd_plan.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part; what follows its name goes to it."""
    return common.run_part("local_sgd", __doc__, _PARTS, argv)
