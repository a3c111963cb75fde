"""Stochastic gradient push (SGP): each rank pushes half of its model to one peer, which changes from step to step.

Choose it if links go one way, or to compare with Crossover. It sends as many bytes, but to one peer instead of many,
and sends weights along that keep the mean right.

  sordino run -np 4 -- python examples/with_push_sum.py
"""

from minimal import train
from sordino.algorithms import PushSum

if __name__ == "__main__":
    train(PushSum())
