"""A rank of a DDP job with `hooks.Encoded`: `encoded_worker.py encoded STORE RANK SIZE`.

Gradients are known numbers. Their encoded means on the device of SORDINO_TEST_DEVICE must have the same bits on all
ranks, and the same bits as on the CPU. Without that variable the device is the CPU, which is then compared with itself.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sordino.distributed import hooks, register

DEVICE = torch.device(os.environ.get("SORDINO_TEST_DEVICE", "cpu"))
CODECS = ("int8", "int4", "Sign(block=32)", "TopK(ratio=0.1, chunk=128)", "bfloat16")


def gradients(device: torch.device, codec: str, rank: int, steps: int) -> list[torch.Tensor]:
    """Return the averaged gradients of each step, on the CPU."""
    model = torch.nn.Linear(1000, 3, bias=False).to(device)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(hooks.Encoded(codec), hooks.average)
    found = []
    for step in range(steps):
        inputs = torch.randn(1000, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        model.weight.grad = None
        # The gradient of each row is the input, times a power of two.
        (ddp(inputs) * torch.tensor([1.0, 2.0, 0.5], device=device)).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.device.type == device.type
        found.append(model.weight.grad.cpu().clone())
    return found


def main() -> None:
    store, rank, size = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    register()
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("sordino", init_method=f"file://{store}", rank=rank, world_size=size)
    for codec in CODECS:
        here = gradients(torch.device("cpu"), codec, rank, 4)
        there = gradients(DEVICE, codec, rank, 4)
        for step, (one, other) in enumerate(zip(here, there, strict=True)):
            assert torch.equal(one, other), (codec, step)
            others = [torch.empty_like(one) for _ in range(size)]
            dist.all_gather(others, one)
            assert all(torch.equal(one, each) for each in others), (codec, step)
        inputs = [torch.randn(1000, generator=torch.Generator().manual_seed(each)) for each in range(size)]
        mean = torch.stack(inputs).mean(0)
        assert torch.nn.functional.cosine_similarity(here[0][0], mean, dim=0) > 0.5, codec
    dist.destroy_process_group()
    print("well", rank, flush=True)


if __name__ == "__main__":
    main()
