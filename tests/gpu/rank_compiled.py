"""Training as on users' GPUs: mixed precision, channels_last and torch.compile together, compared with a plain model on
the whole batch."""

from __future__ import annotations

import torch
from checks.models import MODELS, batch, fill, part
from rank_seat import Seat, check
from rank_training import ROWS, momentum

import sordino.torch as hvd

STEPS = 6
MODES = ("default", "reduce-overhead")
"""Modes of inductor. The second one replays CUDA graphs of forward and backward; our hooks run between them."""


def train(seat: Seat, backend: str, **options: object) -> None:
    models = [
        fill(MODELS["conv"](), 3).to(seat.device, memory_format=torch.channels_last),
        fill(MODELS["conv"](), 3).to(seat.device),
    ]
    torch._dynamo.reset()
    compiled = torch.compile(models[0], backend=backend, **options)
    wrapped = hvd.DistributedOptimizer(momentum(models[0]), models[0].named_parameters())
    optimizers = [wrapped, momentum(models[1])]
    begun = [one.detach().clone() for one in models[0].parameters()]
    for turn in range(STEPS):
        whole = [one.float() for one in batch(ROWS * seat.size, turn)]
        mine = part(whole, seat.rank, seat.size)
        for model, optimizer, rows in zip((compiled, models[1]), optimizers, (mine, whole)):
            # CUDA graphs create gradients in their own memory, which the next replay overwrites, so none may be kept.
            optimizer.zero_grad(set_to_none=turn % 2 == 0 or options.get("mode") == "reduce-overhead")
            x, y = (seat.put(one) for one in rows)
            with torch.autocast(seat.device.type, dtype=torch.bfloat16):
                loss = ((model(x).float() - y) ** 2).mean()
            loss.backward()
            optimizer.step()
    for (name, mine), wanted, first in zip(models[0].named_parameters(), models[1].parameters(), begun):
        seat.same(name, mine)
        assert not torch.equal(mine, first), f"{name} was not trained"
        torch.testing.assert_close(mine, wanted, atol=0.03, rtol=0.03, msg=name)
    assert models[0].deep.weight.is_contiguous(memory_format=torch.channels_last)


@check(each=("eager", "aot_eager"))
def without_a_compiler(seat: Seat, backend: str) -> None:
    train(seat, backend)


@check(cuda=True, each=MODES)
def by_inductor(seat: Seat, mode: str) -> None:
    train(seat, "inductor", mode=mode)
