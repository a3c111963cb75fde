"""AD-PSGD: pairs of ranks average their models in the background, while both compute.

Choose it where ranks differ in speed: nobody waits for the slowest, and ranks that die are left out. The models of the
ranks differ until the end.

  sordino run -np 4 -- python examples/with_adpsgd.py
"""

from minimal import train
from sordino.algorithms import ADPSGD

if __name__ == "__main__":
    train(ADPSGD())
