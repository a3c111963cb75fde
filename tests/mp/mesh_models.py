"""The model of mesh_worker.py, and its data."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import sordino.torch as hvd


class Net(torch.nn.Module):
    """A model of which some parameters have no equal shards, and one cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.scales = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(torch.tanh(self.one(x)))
        return self.scale * y if self.scales else y


def made() -> Net:
    torch.manual_seed(5)
    return Net().double()


def sharded(mesh: DeviceMesh) -> Any:
    model = made()
    fully_shard(model.one, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def mesh_of(size: int, replicas: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def wrapped(model: torch.nn.Module, **options: Any) -> hvd.DistributedOptimizer:
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    return hvd.DistributedOptimizer(adam, model.named_parameters(), **options)


def batch(replica: int, step: int, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * turn + replica)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64)
