"""CaPS, parameter skipping: parameters that have stopped changing are not sent.

Choose it for long trainings that settle, and when you may tell how much change you can do without: `threshold` is the
share of a tensor's elements that must have stayed the same for it to be left out. `optimizer.statistics` says what was.

  sordino run -np 4 -- python examples/with_caps.py
"""

from minimal import train
from sordino.algorithms import ParameterSkipping

if __name__ == "__main__":
    train(ParameterSkipping(detector="naive", digits=4, threshold=90))
