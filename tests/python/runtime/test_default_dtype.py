"""A default dtype other than float32: the library's own tensors have the dtypes that its kernels read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from checks.models import batch, loss_of, make_model
from torch_calls import calls_without

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import DPSGD, Algorithm, AllReduce, DiLoCo
from sordino.codecs import TopK

_OF_DEFAULT_DTYPE = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("folder", ["runtime", "algorithms", "torch", "checkpoint", "codecs", "distributed"])
def test_every_tensor_has_a_dtype(folder: str) -> None:
    """torch.zeros(...) without dtype= would have the user's default dtype, and kernels read its memory as float32."""
    found = calls_without("dtype", _OF_DEFAULT_DTYPE, folder)
    assert not found, f"give these dtype=: {found}"


def trained(algorithm: Algorithm, compression: object) -> list[torch.Tensor]:
    """Return the parameters of rank 0 after some steps."""
    found: list[torch.Tensor] = []

    def job() -> None:
        model = make_model("small", 3).float()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(
            sgd, model.named_parameters(), compression=compression, algorithm=algorithm
        )
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, *(one.float() for one in batch(4, 100 * hvd.rank() + step))).backward()
            optimizer.step()
        optimizer.flush()
        if hvd.rank() == 0:
            found.extend(parameter.detach().clone() for parameter in model.parameters())

    sim.run(4, job, ranks_per_node=2)
    return found


CASES = [
    (AllReduce(), "int8"),
    (AllReduce(), "sign"),
    (AllReduce(), TopK(0.2, 32, contributors=True)),
    (DPSGD(compression="int8"), hvd.Compression.none),
    (DiLoCo(2, compression="int8"), hvd.Compression.none),
]


@pytest.mark.parametrize(("algorithm", "compression"), CASES, ids=["int8", "sign", "topk", "dpsgd", "diloco"])
def test_training_has_the_same_bits_with_another_default_dtype(algorithm: Algorithm, compression: object) -> None:
    wanted = trained(algorithm, compression)
    with default_dtype(torch.float64):
        found = trained(algorithm, compression)
    assert all(map(torch.equal, found, wanted))
