"""Hierarchical local SGD: communication in a step, PyTorch's own local SGD beside it, accuracy, and predictions.

  python benchmarks/local_sgd.py communication        # as root: it makes hosts and starts the ranks by itself
  python benchmarks/local_sgd.py torch                # as root, too
  python benchmarks/local_sgd.py accuracy
  python benchmarks/local_sgd.py plan                 # as root, too

Each part says more with --help.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sordino.bench import local_sgd_accuracy, local_sgd_communication, local_sgd_plan, local_sgd_torch

_PARTS = {
    "communication": local_sgd_communication.main,
    "torch": local_sgd_torch.main,
    "accuracy": local_sgd_accuracy.main,
    "plan": local_sgd_plan.main,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one part; what follows its name goes to it."""
    options = argparse.ArgumentParser(
        prog="local_sgd", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("part", choices=_PARTS, help="which part")
    options.add_argument("arguments", nargs=argparse.REMAINDER, help="for the part (--help lists them)")
    chosen = options.parse_args(argv)
    return _PARTS[chosen.part](chosen.arguments)
