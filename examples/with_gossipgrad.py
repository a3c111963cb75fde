"""GossipGraD: each rank averages its model with the rank 1, 2, 4, ... places before it, and again from 1.

Choose it for comparison: information from one rank reaches all others in log2 N steps, over peers known beforehand.

  sordino run -np 4 -- python examples/with_gossipgrad.py
"""

from minimal import train
from sordino.algorithms import GossipGraD

if __name__ == "__main__":
    train(GossipGraD())
