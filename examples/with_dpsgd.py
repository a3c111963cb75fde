"""D-PSGD: each rank averages its model with both neighbours' on a ring.

Choose it where the network is a ring, or as the textbook's baseline for gossip: what one rank has learnt takes N/2
steps to the other side.

  sordino run -np 4 -- python examples/with_dpsgd.py
"""

from minimal import train
from sordino.algorithms import DPSGD

if __name__ == "__main__":
    train(DPSGD())
