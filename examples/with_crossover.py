"""Crossover-SGD: after a step of its own each rank averages every part of its model with another random rank's.

Choose it where an all-reduce waits for the slowest of many links, and for large batches. A rank sends its model once a
step however many ranks there are. `group_size=K` averages gradients within groups of K first: take the ranks of a node.

  sordino run -np 4 -- python examples/with_crossover.py
"""

from minimal import train
from sordino.algorithms import Crossover

if __name__ == "__main__":
    train(Crossover(group_size=1))
