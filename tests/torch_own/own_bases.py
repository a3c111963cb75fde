"""The base classes of torch's own tests with the backend "sordino": continuous processes, DTensor, and FSDP.

The wheel of torch has the bases, but not the tests that are made with them. These here call each base's checks.
`own_bases.py CLASS` runs a class.
"""

from __future__ import annotations

import unittest

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_fsdp import FSDPTestMixin, MLPStack, check_sharded_parity
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestMixin

BACKEND = "sordino"


class TestContinuous(MultiProcContinuousTest):
    """Processes that stay for all tests of a class."""

    world_size = 3
    device_type = "cpu"

    @classmethod
    def backend_str(cls) -> str:
        return BACKEND

    def test_backend(self) -> None:
        assert dist.get_backend() == BACKEND
        assert (dist.get_rank(), dist.get_world_size()) == (self.rank, self.world_size)

    def test_collectives(self) -> None:
        tensor = torch.full((5,), self.rank + 1.0)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((5,), 6.0))
        found = [torch.empty(2) for _ in range(3)]
        dist.all_gather(found, torch.full((2,), float(self.rank)))
        self.assertEqual(found, [torch.full((2,), float(rank)) for rank in range(3)])

    def test_objects(self) -> None:
        found: list[object] = [None] * 3
        dist.all_gather_object(found, {"rank": self.rank})
        self.assertEqual(found, [{"rank": rank} for rank in range(3)])


class TestDTensor(DTensorTestMixin, MultiProcContinuousTest):
    """Operations on DTensors, in all shardings of their arguments that `DTensorConverter` makes."""

    world_size = 4
    device_type = "cpu"

    @classmethod
    def backend_str(cls) -> str:
        return BACKEND

    def test_operations(self) -> None:
        mesh = self.build_device_mesh()
        x, y = torch.randn(8, 12), torch.randn(12, 4)
        self._test_op(mesh, torch.mm, x, y)
        self._test_op(mesh, torch.add, x, torch.randn(8, 12))
        self._test_op(mesh, torch.sum, x)
        self._test_op(mesh, lambda one: torch.softmax(one, dim=1), x)
        self._test_op(mesh, lambda one: torch.nn.functional.layer_norm(one, (12,)), x)
        self._test_op(mesh, lambda one: one.t().contiguous().mean(dim=0), x)

    def test_redistribution(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.arange(7.0 * 8).view(7, 8)  # 7 rows on 4 ranks: shards of different sizes
        places = [Replicate(), Shard(0), Shard(1)]
        for before in places:
            tensor = distribute_tensor(whole, mesh, [before])
            for after in places:
                moved = tensor.redistribute(mesh, [after])
                self.assertEqual(moved.full_tensor(), whole)
                self.assertEqual(moved.placements, (after,))

    def test_gradients(self) -> None:
        mesh = self.build_device_mesh()
        weight, x = torch.randn(8, 8), torch.randn(4, 8)
        plain = weight.clone().requires_grad_()
        (x @ plain).pow(2).sum().backward()
        sharded = distribute_tensor(weight, mesh, [Shard(1)]).requires_grad_()
        (distribute_tensor(x, mesh, [Replicate()]) @ sharded).pow(2).sum().backward()
        assert isinstance(sharded.grad, DTensor)
        self.assertEqual(sharded.grad.full_tensor(), plain.grad)


class TestFSDP(FSDPTestMixin, MultiProcContinuousTest):
    """`fully_shard` against the unsharded model, whose gradients are averaged over the ranks."""

    world_size = 4
    device_type = "cpu"

    @classmethod
    def backend_str(cls) -> str:
        return BACKEND

    def test_parity(self) -> None:
        torch.manual_seed(1)
        plain = MLPStack(16)
        sharded = MLPStack(16)
        sharded.load_state_dict(plain.state_dict())
        for module in sharded:
            fully_shard(module)
        fully_shard(sharded)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, sharded)]
        for step in range(3):
            torch.manual_seed(10 * step + self.rank)
            x = torch.randn(4, 16)
            losses = [model(x).pow(2).sum() for model in (plain, sharded)]
            for loss in losses:
                loss.backward()
            for parameter in plain.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            self.assertEqual(losses[0], losses[1])
            check_sharded_parity(self, plain, sharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    unittest.main()
