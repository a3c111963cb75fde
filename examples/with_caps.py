"""CaPS, parameter skipping: parameters that have stopped changing are not sent.

Choose it for long trainings that settle, if you can say how much change may be ignored: a tensor is left out if at
least `threshold` percent of its elements have not changed. `optimizer.statistics` tells what was left out.

  sordino run -np 4 -- python examples/with_caps.py
"""

from minimal import train
from sordino.algorithms import CaPS

if __name__ == "__main__":
    train(CaPS(detector="naive", digits=4, threshold=90))
