"""Python functions of Sordino, and their files, that rank 0 calls between `zero_grad()` and the end of `step()`.

  python benchmarks/walk.py
  python benchmarks/walk.py --show crossover     # functions of one algorithm, by first call

The ranks are threads. Functions of torch and compiled functions are not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import sordino
import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import AllReduce, Crossover, LocalSGD
from sordino.report.tables import table

PACKAGE = Path(sordino.__file__).parent
STEPS = 6  # steps before the counted one, in which plans are made and gradients move into flat buffers
WALKS = {"allreduce": AllReduce(), "crossover": Crossover(), "local-sgd": LocalSGD(interval=1, group_size=2)}
MOST = {"allreduce": (30, 6), "crossover": (25, 7), "local-sgd": (60, 9)}
"""Largest allowed number of different functions and files."""

Walk = Counter[tuple[str, str]]
"""Number of calls of each function by file and name, in the order of the first calls."""


def walk(algorithm: Any) -> Walk:
    """Return the calls of rank 0 in one step of four ranks."""

    def train() -> Walk:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), algorithm=algorithm
        )
        found: Walk = Counter()

        def called(frame: FrameType, event: str, _: object) -> None:
            code: CodeType = frame.f_code
            if event == "call" and code.co_filename.startswith(str(PACKAGE)):
                found[str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname] += 1

        for step in range(STEPS + 1):
            sys.setprofile(called if step == STEPS and hvd.rank() == 0 else None)
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            sys.setprofile(None)
        return found

    return sim.run(4, train)[0]


def main() -> int:
    """Print a table of all algorithms, or the calls of one. Return 1 if an algorithm exceeds its limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=WALKS, help="print the functions in a step of this algorithm")
    options = parser.parse_args()
    if options.show:
        for (file, name), count in walk(WALKS[options.show]).items():
            print(f"{count:4} {file}: {name}")
        return 0
    rows, longer = [], False
    for name, algorithm in WALKS.items():
        found = walk(algorithm)
        files = len({file for file, _ in found})
        most_functions, most_files = MOST[name]
        longer |= len(found) > most_functions or files > most_files
        rows.append([name, str(found.total()), f"{len(found)} of {most_functions}", f"{files} of {most_files}"])
    print(table(["", "Calls", "Functions", "Files"], rows))
    return int(longer)


if __name__ == "__main__":
    sys.exit(main())
