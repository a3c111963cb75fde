"""A rank that trains a small model by one algorithm after the other and reports a hash of the result on each rank.

    same_bits_worker.py OUT    under any launcher; rank 0 writes the hashes of all ranks' models to OUT, by algorithm

Double buffering is left out. Small all-reduces that are ready at the same time are sent as one. With several steps in
flight, timing decides which ones, and another length is summed in other parts.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from algorithm_table import SYNCHRONOUS, often

import sordino.torch as hvd
from sordino.algorithms import (
    CaPS,
    Crossover,
    Layered,
    LocalSGD,
    PushSum,
)  # fmt: skip

STEPS = 6
ALGORITHMS = {
    **{name: often(one) for name, one in SYNCHRONOUS.items()},
    "crossover in pairs": Crossover(group_size=2),
    "layered": Layered(group_size=2),
    "local-sgd, sharded": LocalSGD(interval=2, group_size=2),
    "caps, server": CaPS(exchange="parameter-server"),
    "push-sum, overlapping": PushSum(overlap=1),
}


def train(algorithm: object) -> str:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 200))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), algorithm=algorithm)
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    found = {name: hvd.allgather_object(train(algorithm)) for name, algorithm in ALGORITHMS.items()}
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps({"transport": hvd.transport(), "nodes": hvd.cross_size(), **found}))
    hvd.shutdown()


if __name__ == "__main__":
    main()
