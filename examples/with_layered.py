"""Layered SGD: synchronous SGD whose all-reduce hides behind the loading of the next batch.

Choose it where loading takes long: the step is completed when somebody uses a parameter, so whatever comes between
`step()` and the next forward pass costs nothing. The parameters are those of an all-reduce.

  sordino run -np 4 -- python examples/with_layered.py
"""

from minimal import train
from sordino.algorithms import Layered

if __name__ == "__main__":
    train(Layered(group_size=2))
