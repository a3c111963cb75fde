"""AD-PSGD: pairs of ranks average their models in the background, while both compute.

Choose it if ranks differ in speed: no rank waits for the slowest one, and training continues without lost ranks. The
models of the ranks differ until the end.

  sordino run -np 4 -- python examples/with_adpsgd.py
"""

from minimal import train
from sordino.algorithms import ADPSGD

if __name__ == "__main__":
    train(ADPSGD())
