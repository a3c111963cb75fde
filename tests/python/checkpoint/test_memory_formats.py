"""Checkpoints of algorithms do not depend on the memory format of the model: training with channels_last continues
without it, and the other way round, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import Algorithm, AllReduce, DiLoCo, ElasticAveraging, LocalSGD, NoLoCo
from sordino.codecs import Codec, Sign

SAVED, LAST = 5, 11
FORMATS = (torch.channels_last, torch.contiguous_format)
KINDS: dict[str, tuple[Algorithm, Codec | None]] = {
    "residuals of gradients": (AllReduce(), Sign(32)),
    "gradients of the step before": (AllReduce(double_buffering=True), None),
    "outer parameters and momentum": (DiLoCo(4, outer_momentum=0.9), None),
    "outer gradient in flight": (DiLoCo(4, outer_momentum=0.9, overlap=2), None),
    "own outer parameters": (NoLoCo(4), None),
    "center": (ElasticAveraging(2), None),
    "models after an averaging": (LocalSGD(4, aggregate="gradients"), None),
}


class Image(torch.nn.Module):
    """Two parameters whose gradients are computed element by element, so with the same bits in each memory format."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.image = torch.nn.Parameter(torch.randn(2, 3, 4, 5, generator=generator))
        self.scale = torch.nn.Parameter(torch.randn(7, generator=generator))
        self.image.data = self.image.data.contiguous(memory_format=memory_format)

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        loss = sum((one * torch.randn(one.shape, generator=generator)).square().sum() for one in self.parameters())
        loss.backward()


def resume(algorithm: Algorithm, codec: Codec | None, before: int) -> None:
    """Train, and continue from a state in the middle also with the other memory format."""

    def wrap(model: Image) -> hvd.DistributedOptimizer:
        sgd = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
        options = {} if codec is None else {"compression": codec}
        return hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm, **options)

    def train(model: Image, optimizer: hvd.DistributedOptimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model.set_gradients(step)
            optimizer.step()

    model = Image(FORMATS[before])
    optimizer = wrap(model)
    train(model, optimizer, range(SAVED))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(SAVED, LAST))
    other = Image(FORMATS[1 - before])
    assert other.image.stride() != model.image.stride()
    other.load_state_dict(saved[0])
    resumed = wrap(other)
    resumed.load_state_dict(saved[1])
    train(other, resumed, range(SAVED, LAST))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_in_another_memory_format(kind: str, before: int) -> None:
    sim.run(2, resume, *KINDS[kind], before)
