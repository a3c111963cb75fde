"""Train a small GPT as scripts for DDP do: AdamW, a cosine schedule, accumulation, clipping, bfloat16 by autocast.

    ddp_twin.py ddp|sordino OUT    under torchrun or `sordino run`; rank 0 writes the losses to OUT

Only `wrapped` differs between the two.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

STEPS, MICRO, BATCH, LENGTH, VOCABULARY, WIDTH = 50, 2, 4, 32, 128, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attention(self.before(x)).unflatten(2, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.last = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.blocks(self.tokens(tokens) + self.places.weight)))


Wrapped = tuple[int, nn.Module, torch.optim.Optimizer, Callable[[], AbstractContextManager[None]]]


def wrapped(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    """Return the rank, the model, the optimizer, and the context for backward passes that only accumulate."""
    if how == "ddp":
        torch.distributed.init_process_group("gloo")
        ddp = nn.parallel.DistributedDataParallel(model)
        return torch.distributed.get_rank(), ddp, optimizer, ddp.no_sync
    import sordino.torch as hvd

    hvd.init()
    opt = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.rank(), model, opt, opt.no_sync


def main(how: str, out: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    bare = Gpt()
    adamw = torch.optim.AdamW(bare.parameters(), lr=3e-3, weight_decay=0.1)
    rank, model, optimizer, no_sync = wrapped(how, bare, adamw)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / STEPS)) / 2)
    data = torch.Generator().manual_seed(1 + rank)
    told: list[tuple[float, float]] = []
    for _ in range(STEPS):
        total = 0.0
        for micro in range(MICRO):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=data)
            tokens[:, 1::2] = tokens[:, ::2]  # something to learn
            with no_sync() if micro < MICRO - 1 else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16):
                    scores = model(tokens[:, :])
                    loss = functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / MICRO
                loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        told.append((total, norm.item()))
    if rank == 0:
        Path(out).write_text(json.dumps(told))
    if how == "ddp":
        del model, no_sync  # a DDP that is freed after its group may wait forever
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
