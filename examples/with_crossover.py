"""Crossover-SGD: after its own step each rank averages every part of its model with that of another random rank.

Choose it if an all-reduce waits for the slowest of many links, and for large batches. A rank sends its model once per
step for any number of ranks. `group_size=K` first averages gradients within groups of K, usually the ranks of a node.

  sordino run -np 4 -- python examples/with_crossover.py
"""

from minimal import train
from sordino.algorithms import Crossover

if __name__ == "__main__":
    train(Crossover(group_size=1))
