"""D-PSGD: each rank averages its model with those of both neighbors on a ring.

Choose it if the network is a ring, or as the textbook baseline for gossip. Information from one rank takes N/2 steps to
the opposite side.

  sordino run -np 4 -- python examples/with_dpsgd.py
"""

from minimal import train
from sordino.algorithms import DPSGD

if __name__ == "__main__":
    train(DPSGD())
