"""Segmented gossip (COMBO): each rank pulls every part of its model from a few random others.

Choose it to compare with Crossover. Both exchange segments, but here no schedule balances which ranks are asked, so
some ranks send many times more than others.

  sordino run -np 4 -- python examples/with_segmented_gossip.py
"""

from minimal import train
from sordino.algorithms import SegmentedGossip

if __name__ == "__main__":
    train(SegmentedGossip(replicas=1))
