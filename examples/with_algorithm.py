"""The same training with any algorithm, by its name and its settings.

The page of an algorithm in docs/algorithms says when to choose it, and which settings it has.

  sordino run -np 4 -- python examples/with_algorithm.py crossover
  sordino run -np 4 -- python examples/with_algorithm.py local-sgd interval=8 group_size=2
"""

import sys

from minimal import train
from sordino.algorithms import class_of, configured

if __name__ == "__main__":
    name, *settings = sys.argv[1:] or ["allreduce"]
    train(configured(class_of(name), name, settings))
