"""Layered SGD: synchronous SGD whose all-reduce hides behind the loading of the next batch.

Choose it if loading takes long. The step is completed when a parameter is used next, so the time between `step()` and
the next forward pass hides the all-reduce. The parameters are the same as with an all-reduce.

  sordino run -np 4 -- python examples/with_layered.py
"""

from minimal import train
from sordino.algorithms import Layered

if __name__ == "__main__":
    train(Layered(group_size=2))
