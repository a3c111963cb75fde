"""A rank of a job that uses other parts of torch with the backend "sordino": `features_worker.py PART STORE RANK SIZE`.

Parts: compiled (torch.compile around DistributedDataParallel and around operations), checkpoints (functions of
torch.distributed.checkpoint that ask the group for its devices), complex_models (DistributedDataParallel with complex
parameters and buffers).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sordino.distributed import register


def compiled(rank: int, size: int) -> None:
    """Compiled code has the results of uncompiled code; Dynamo must not trace into the process group."""

    def later(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        z = x + 1
        work.wait()
        return y * z

    def from_others(x: torch.Tensor) -> torch.Tensor:
        y, received = x * 2, torch.empty_like(x)
        dist.broadcast(y, 1)
        dist.barrier()
        ends = [dist.P2POp(dist.isend, x + 1, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()
        return y + received

    x = torch.arange(5.0) + rank
    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (later, from_others)
    for function in functions:
        assert torch.equal(torch.compile(function, backend="eager")(x), function(x)), function
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: nn.Module = DistributedDataParallel(nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 1)))
        model = torch.compile(model, backend="eager") if compiles else model  # type: ignore[assignment]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))


def checkpoints(rank: int, size: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    folder = Path(sys.argv[5])
    mine = {"weight": torch.full((3,), 7.0)}
    dcp.async_save(mine, checkpoint_id=folder, process_group=dist.new_group()).result()
    found = {"weight": torch.zeros(3)}
    dcp.load(found, checkpoint_id=folder)
    assert found["weight"].tolist() == [7.0] * 3
    model = nn.Linear(4, 2)
    fully_shard(model)
    whole = {"weight": torch.arange(8.0).view(2, 4), "bias": torch.ones(2)} if rank == 0 else {}
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert model.weight.full_tensor().tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]  # type: ignore[operator]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("turn", torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight * self.turn).abs().square().sum()


def complex_models(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = DistributedDataParallel(Complex())
    torch.manual_seed(0)
    same = Complex()  # the values of rank 0
    assert torch.equal(model.module.turn, same.turn)  # type: ignore[arg-type]
    model(torch.tensor(rank + 1.0)).backward()
    sum(same(torch.tensor(one + 1.0)) for one in range(size)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(model.module.weight.grad, same.weight.grad / size)  # type: ignore[operator]


def main() -> None:
    part, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    register()  # torch does that only if the package is installed, not copied to a folder
    dist.init_process_group("sordino", init_method=f"file://{store}", rank=rank, world_size=size)
    globals()[part](rank, size)
    dist.destroy_process_group()
    print("well", rank, flush=True)


if __name__ == "__main__":
    main()
