"""A default device other than the host's: the library makes its own tensors on the device where it needs them."""

from __future__ import annotations

import pytest
import torch
from checks.models import batch, loss_of, make_model
from torch_calls import calls_without

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import ADPSGD, Algorithm, AllReduce, Crossover, LocalSGD, names, resolve
from sordino.algorithms.caps import CaPS
from sordino.algorithms.local_sgd import AdaptiveInterval

_FACTORIES = {
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


@pytest.mark.parametrize("folder", ["runtime", "algorithms", "torch", "checkpoint", "distributed"])
def test_every_tensor_has_a_device(folder: str) -> None:
    """torch.tensor(...) without device= would be on the user's default device."""
    found = calls_without("device", _FACTORIES, folder)
    assert not found, f"give these device=: {found}"


ALGORITHMS = [
    *(resolve(name) for name in names() if name not in ("adpsgd", "layered")),
    ADPSGD(overlap=0),
    LocalSGD(interval=2, group_size=2, adaptive=AdaptiveInterval(block=2)),
    LocalSGD(interval=2, start=2, log_distance=1, aggregate="gradients"),
    Crossover(group_size=2),
    AllReduce(double_buffering=True),
    CaPS(detector="movement"),
    CaPS(detector="random"),
    CaPS(detector="history"),
    resolve("layered"),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.written())
def test_algorithms_train_with_another_default_device(algorithm: Algorithm) -> None:
    def job() -> None:
        model = make_model("small", 3)
        data = [batch(4, 100 * hvd.rank() + step) for step in range(3)]
        with torch.device("meta"):
            sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            finite = not algorithm.traits.late
            optimizer = hvd.DistributedOptimizer(
                sgd, model.named_parameters(), algorithm=algorithm, check_finite=finite
            )
            for one in data:
                optimizer.zero_grad()
                loss_of(model, *one).backward()
                optimizer.step()
                if getattr(algorithm, "adaptive", None) is not None:
                    optimizer.report_metric(1.0)
            optimizer.flush()
            optimizer.load_state_dict(optimizer.state_dict())
            assert hvd.consensus_distance(model) < 10

    sim.run(4, job, ranks_per_node=2)


def test_collectives_with_another_default_device() -> None:
    def job() -> None:
        mine = torch.full((4,), float(hvd.rank()))
        model = make_model("small", hvd.rank())
        norm = hvd.SyncBatchNorm(6)
        with torch.device("meta"):
            assert hvd.broadcast_object(hvd.rank(), 1) == 1
            assert hvd.allgather_object(hvd.rank()) == [0, 1]
            assert hvd.allreduce(mine).tolist() == [0.5] * 4
            got, splits = hvd.alltoall(mine, splits=[1, 3])
            assert len(got) == sum(splits.tolist())
            hvd.alltoall(mine, splits=torch.tensor([1, 3], dtype=torch.int32, device="cpu"))
            hvd.broadcast_parameters(model.state_dict(), 0)
            sgd = torch.optim.Adam(model.parameters())
            hvd.broadcast_optimizer_state(sgd, 0)
            norm(torch.ones(3, 6, device="cpu")).sum().backward()
            hvd.barrier()

    sim.run(2, job)


def test_sampler_with_another_default_device() -> None:
    def job() -> None:
        with torch.device("meta"):
            sampler = hvd.elastic.ElasticSampler(list(range(10)))
            assert len(list(sampler)) == 5

    sim.run(2, job)
