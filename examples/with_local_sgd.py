"""Hierarchical local SGD: groups train their own models, which are averaged every few steps.

Choose it on several nodes whose network is slower than the links within a node: `group_size` is the ranks of a node,
and only every `interval`-th step uses the network. Each rank of a group holds 1/K of the optimizer's state.

  sordino run -np 4 -- python examples/with_local_sgd.py
"""

from minimal import train
from sordino.algorithms import LocalSGD

if __name__ == "__main__":
    train(LocalSGD(interval=8, group_size=2))
