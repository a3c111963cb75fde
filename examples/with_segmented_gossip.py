"""Segmented gossip (COMBO): each rank pulls every part of its model from a few random others.

Choose it to compare with Crossover, from whose segments it differs in that nobody balances who is asked, so that some
ranks send many times what others do.

  sordino run -np 4 -- python examples/with_segmented_gossip.py
"""

from minimal import train
from sordino.algorithms import SegmentedGossip

if __name__ == "__main__":
    train(SegmentedGossip(replicas=1))
