"""A complete training in one file: scikit-learn's digits, on one rank or many.

  python examples/minimal.py
  sordino run -np 4 -- python examples/minimal.py

with_algorithm.py trains with any algorithm.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

import sordino.torch as hvd
from sordino.algorithms import Algorithm, AlgorithmName


def train(algorithm: Algorithm | AlgorithmName = "allreduce", epochs: int = 10) -> float:
    """Train with an algorithm. Return the test accuracy of the mean of the ranks' models."""
    hvd.init()
    torch.set_num_threads(1)  # more threads are slower for a model this small
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    mine = torch.arange(1500)[hvd.rank() :: hvd.size()]  # each rank trains on its part; the rest is the test

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for _ in range(epochs):
        for rows in mine[torch.randperm(1500 // hvd.size())].split(32):  # equally many on every rank
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            hvd.record(loss=loss)  # for `sordino report`, if a record is written

    model.load_state_dict(hvd.average_parameters(model))
    right: float = (model(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean().item()
    if hvd.rank() == 0:
        sent = hvd.stats()["bytes_sent"] / 1e6
        print(f"{algorithm} on {hvd.size()} rank(s): {right:.1%} right, {sent:.1f} MB sent by rank 0")
    return right


if __name__ == "__main__":
    train()
