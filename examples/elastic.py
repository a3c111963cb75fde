"""A training that loses ranks and gains ranks while it runs: scikit-learn's digits.

  sordino run -np 4 --respawn 3 -- python examples/elastic.py           kill a rank, and a new process takes its place
  sordino run -np 4 --on-peer-lost continue -- python examples/elastic.py
  sordino join -- python examples/elastic.py                            in another terminal: a fifth rank

docs/faults.md explains it.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import sordino.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--algorithm", default="allreduce")
parser.add_argument("--epochs", type=int, default=200)
parser.add_argument("--pause", type=float, default=0.01, metavar="S", help="seconds added to each step")


@hvd.elastic.run
def train(state: Any, loader: DataLoader[Any], epochs: int, pause: float) -> None:
    """Train until `state.epoch` reaches `epochs`. Called again when ranks have left or joined."""
    while state.epoch < epochs:
        for number, (images, labels) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(state.model(images), labels)
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(number, loader.batch_size)
            state.loss = loss.item()
            state.commit()  # others may join or leave here; then this function is called again
            time.sleep(pause)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        if hvd.rank() == 0 and state.epoch % 5 == 0:
            print(f"epoch {state.epoch}: loss {state.loss:.4f} on {hvd.size()} ranks", flush=True)


def main() -> None:
    """Prepare this rank, train, and print the accuracy."""
    arguments = parser.parse_args()
    hvd.init(on_peer_lost="continue")
    torch.set_num_threads(1)
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    data = TensorDataset(images[:1500], labels[:1500])
    sampler = hvd.elastic.ElasticSampler(data)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=arguments.algorithm)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, loss=0.0)
    print(f"process {os.getpid()} is ready", flush=True)
    train(state, DataLoader(data, batch_size=32, sampler=sampler), arguments.epochs, arguments.pause)
    model.load_state_dict(hvd.average_parameters(model))
    right = (model(images[1500:]).argmax(dim=1) == labels[1500:]).float().mean().item()
    if hvd.rank() == 0:
        print(f"{arguments.algorithm} on {hvd.size()} ranks: {right:.1%} right")


if __name__ == "__main__":
    main()
