"""Random training scripts. Each is trained once under DistributedDataParallel over gloo and once under
DistributedOptimizer, and must give the same gradients, parameters and hook calls.

sordino run -np 2 -- python tests/mp/training_programs.py FOLDER --first 0 --count 12     # these seeds
sordino run -np 2 -- python tests/mp/training_programs.py FOLDER --minutes 60             # all seeds within an hour

FOLDER is empty and the same for all ranks. Depending on its seed, a script has tied, frozen and unused parameters,
hooks of all kinds that are registered before or after wrapping, accumulation, clipping, several optimizers, closures,
schedules, recomputed activations and torch.compile.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sordino.torch as hvd

WIDTH, BATCH, STEPS = 6, 4, 4
HOOKS = ("tensor", "post-accumulate", "module", "multi-grad")


@dataclass
class Hook:
    """A hook: its kind, the number of its parameter or block, whether it changes the gradient, and when it is
    registered."""

    kind: str
    target: int
    changes: bool
    after: bool


@dataclass
class Script:
    """A script as drawn by a seed; it is the same on all ranks."""

    seed: int
    blocks: int
    tied: bool
    frozen: int
    unused: str  # "no", "alike" on all ranks, or "apart": each rank leaves out blocks of its own
    optimizers: int
    kind: str
    micro: int
    twice: bool
    clip: float
    to_none: bool
    closure: bool
    schedule: bool
    recompute: bool
    compiled: bool
    phase: bool
    hooks: list[Hook] = field(default_factory=list)

    @classmethod
    def draw(cls, seed: int) -> Script:
        rng = random.Random(seed)
        blocks = rng.randint(1, 4)
        micro = rng.choice((1, 1, 2, 3))
        made = cls(
            seed=seed,
            blocks=blocks,
            tied=rng.random() < 0.3,
            frozen=rng.choice((0, 0, 1, 2)),
            unused=rng.choice(("no", "no", "alike", "apart")),
            optimizers=rng.choice((1, 1, 2)),
            kind=rng.choice(("SGD", "Adam", "AdamW")),
            micro=micro,
            twice=micro == 1 and rng.random() < 0.15,
            clip=rng.choice((0.0, 0.0, 0.1, 1.0)),
            to_none=rng.random() < 0.5,
            closure=micro == 1 and rng.random() < 0.2,
            schedule=rng.random() < 0.3,
            recompute=rng.random() < 0.2,
            compiled=rng.random() < 0.04,
            phase=rng.random() < 0.2,
        )
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            kind = rng.choice(HOOKS)
            made.hooks.append(Hook(kind, rng.randrange(100), rng.random() < 0.5, rng.random() < 0.5))
        if made.unused != "no":
            made.recompute = made.twice = False  # DDP refuses them with unused parameters
        if made.phase:
            made.clip = 0.0  # torch itself cannot clip a gradient with the negative bit
        return made


class Model(nn.Module):
    """Blocks of a residual network, some of which a forward pass may leave out."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(script.blocks)
        )
        self.last = nn.Linear(WIDTH, 2)
        if script.phase:
            self.angle = nn.Parameter(torch.ones(()))
        if script.tied:
            self.blocks[0][2].weight = self.first.weight
        for number in range(script.frozen):
            list(self.parameters())[(7 * number + 1) % len(list(self.parameters()))].requires_grad_(False)

    def forward(self, x: torch.Tensor, left_out: set[int]) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number in left_out:
                continue
            x = x + (checkpoint(block, x, use_reentrant=False) if self.script.recompute else block(x))
        if self.script.phase:
            x = x * (torch.complex(torch.ones_like(self.angle), self.angle).conj() * torch.tensor(2 + 3j)).real
        return self.last(x)


class Hooks:
    """Register a script's hooks, and note their values."""

    def __init__(self, script: Script, model: Model) -> None:
        self.script, self.seen = script, list[tuple[str, float]]()
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.blocks = [model.first, *model.blocks, model.last]

    def register(self, after: bool) -> None:
        for number, hook in enumerate(self.script.hooks):
            if hook.after != after or not self.trained:
                continue
            parameter = self.trained[hook.target % len(self.trained)]
            register: dict[str, Callable[[Hook, str], Any]] = {
                "tensor": lambda hook, name, p=parameter: p.register_hook(self.on_gradient(hook, name)),
                "post-accumulate": lambda hook, name, p=parameter: p.register_post_accumulate_grad_hook(
                    self.on_accumulated(hook, name)
                ),
                "module": lambda hook, name: self.blocks[hook.target % len(self.blocks)].register_full_backward_hook(
                    lambda *_: self.seen.append((name, 1.0))
                ),
                "multi-grad": lambda hook, name, p=parameter: torch.autograd.graph.register_multi_grad_hook(
                    [self.trained[0], p], lambda gradients: self.seen.append((name, total(gradients)))
                ),
            }
            register[hook.kind](hook, f"{number} {hook.kind}")

    def on_gradient(self, hook: Hook, name: str) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def call(gradient: torch.Tensor) -> torch.Tensor | None:
            self.seen.append((name, total([gradient])))
            return 0.5 * gradient if hook.changes else None

        return call

    def on_accumulated(self, hook: Hook, name: str) -> Callable[[torch.Tensor], None]:
        def call(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self.seen.append((name, total([parameter.grad])))
            if hook.changes:
                parameter.grad.mul_(0.1 / (parameter.grad.norm() + 1e-6))  # clipping layer by layer

        return call


def total(gradients: Any) -> float:
    return sum(float(gradient.double().sum()) for gradient in gradients if gradient is not None)


@dataclass
class Trained:
    """Result of a training: parameters and gradients after each step, and the values of hooks."""

    parameters: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    seen: list[tuple[str, float]] = field(default_factory=list)


def train(script: Script, how: str, rank: int) -> Trained:
    """Train as a script for DDP does; only the wrapper differs."""
    torch.manual_seed(script.seed)
    bare = Model(script).double()
    hooks = Hooks(script, bare)
    hooks.register(after=False)
    trained = list(bare.named_parameters())
    parts = [trained[number :: script.optimizers] for number in range(script.optimizers)]
    made = [
        getattr(torch.optim, script.kind)([p for _, p in part], lr=0.05)
        for part in parts
        if any(p is not None for _, p in part)
    ]
    forward, optimizers, no_sync = wrapped(script, how, bare, made, parts)
    hooks.register(after=True)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in optimizers if script.schedule]
    data = torch.Generator().manual_seed(1000 * script.seed + rank)
    draw = random.Random(f"{script.seed} {rank if script.unused == 'apart' else ''}")
    found = Trained()
    for _ in range(STEPS):
        for micro in range(script.micro):
            x = torch.randn(BATCH, WIDTH, generator=data, dtype=torch.float64)
            y = torch.randn(BATCH, 2, generator=data, dtype=torch.float64)
            left_out = {n for n in range(script.blocks) if script.unused != "no" and draw.random() < 0.5}

            def loss(x: torch.Tensor = x, y: torch.Tensor = y, left_out: set[int] = left_out) -> torch.Tensor:
                return nn.functional.mse_loss(forward(x, left_out), y) / script.micro

            with no_sync() if micro < script.micro - 1 else contextlib.nullcontext():
                if script.closure:
                    break
                for _ in range(1 + script.twice):
                    loss().backward()
        if script.closure:

            def closure() -> torch.Tensor:
                value = loss()
                value.backward()
                return value.detach()

            closures = [closure] + [None] * (len(optimizers) - 1)
        else:
            closures = [None] * len(optimizers)
            if script.clip:
                torch.nn.utils.clip_grad_norm_(bare.parameters(), script.clip)
        for optimizer, one in zip(optimizers, closures):
            optimizer.step(one)
        for schedule in schedules:
            schedule.step()
        found.parameters += [p.detach().clone() for _, p in trained]
        found.gradients += [None if p.grad is None else p.grad.detach().clone() for _, p in trained]
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=script.to_none)
    found.seen = hooks.seen
    return found


Wrapped = tuple[Callable[..., torch.Tensor], list[torch.optim.Optimizer], Callable[[], AbstractContextManager[None]]]


def wrapped(script: Script, how: str, bare: Model, made: list[torch.optim.Optimizer], parts: Any) -> Wrapped:
    if how == "ddp":
        ddp = DistributedDataParallel(bare, find_unused_parameters=script.unused != "no")
        return compiled(script, ddp), made, ddp.no_sync
    optimizers: list[torch.optim.Optimizer] = [
        hvd.DistributedOptimizer(one, [(name, p) for name, p in part]) for one, part in zip(made, parts)
    ]

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for one in optimizers:
                stack.enter_context(one.no_sync())  # type: ignore[attr-defined]
            yield

    return compiled(script, bare), optimizers, no_sync


def compiled(script: Script, model: nn.Module) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend="eager") if script.compiled else model


def compare(script: Script, mine: Trained, theirs: Trained) -> None:
    torch.testing.assert_close(mine.parameters, theirs.parameters, rtol=1e-9, atol=1e-12)
    for number, (one, other) in enumerate(zip(mine.gradients, theirs.gradients, strict=True)):
        # DDP gives zeros to a parameter without a gradient on any rank, if it has reduced that parameter in an earlier
        # step.
        if one is None or other is None:
            assert (one is None or not one.any()) and (other is None or not other.any()), f"gradient {number}"
        else:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert [name for name, _ in mine.seen] == [name for name, _ in theirs.seen]
    torch.testing.assert_close(
        torch.tensor([value for _, value in mine.seen], dtype=torch.float64),
        torch.tensor([value for _, value in theirs.seen], dtype=torch.float64),
        rtol=1e-9,
        atol=1e-12,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=1000, help="seed of the first script, default %(default)s")
    parser.add_argument("--count", type=int, help="number of scripts")
    parser.add_argument("--minutes", type=float, default=1.0, help="without --count: how long, default %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="gradients are reduced in every backward")
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    store = torch.distributed.FileStore(str(options.folder / "store"), size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    begun, seed, failed = time.monotonic(), options.first, 0
    while True:
        more = (
            seed < options.first + options.count if options.count else time.monotonic() - begun < 60 * options.minutes
        )
        if not hvd.broadcast_object(more, 0):
            break
        script = Script.draw(seed)
        try:
            theirs = train(script, "ddp", rank)
            compare(script, train(script, "sordino", rank), theirs)
            wrong = ""
        except Exception:
            wrong = traceback.format_exc()
        told = hvd.allgather_object(wrong)
        if any(told):
            failed += 1
            if rank == 0:
                print(
                    f"FAILED: {script}",
                    *(f"rank {r}: {text}" for r, text in enumerate(told) if text),
                    sep="\n",
                    flush=True,
                )
        seed += 1
    if rank == 0:
        print(f"{seed - options.first} scripts, seeds {options.first} to {seed - 1}: {failed} failed", flush=True)
    torch.distributed.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
