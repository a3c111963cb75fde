"""A small GPT trained on bytes, with any algorithm, to compare algorithms at equal tokens.

The text is the source code of Python's standard library, or that of --text FOLDER. One file in twenty is held out. The
loss on the held-out text is printed: that of the outer parameters (DiLoCo), or of the mean of the ranks' models.

  python examples/language.py                                        one process
  mpirun -np 2 python examples/language.py
  sordino run -np 4 -- python examples/language.py --algorithm diloco --set interval=16
  sordino run -np 4 -- python examples/language.py --algorithm crossover --compression int8
  sordino run -np 4 -- python examples/language.py --optimizer muon --tokens 4_000_000 --json curve.json
  torchrun --nproc-per-node 2 examples/language.py --algorithm local-sgd --set interval=16

--tokens and --batch are totals over all ranks. The ranks divide every batch, so 4 ranks take the same steps as 1 rank,
on the same text, and the learning rate (a linear warm-up, then a cosine) needs no scaling.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# Set before torch loads OpenMP, so that waiting threads sleep, and leave the cores to other ranks.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor
from torch.func import functional_call

import sordino
import sordino.torch as hvd
from laboratory.algorithm import Parser, add_algorithm, algorithm_among, algorithm_of, compression_of
from laboratory.common import refuse, share, sum_over_ranks, together, use_threads
from laboratory.gpt import GPT, loss_of, optimizer_of
from laboratory.text import Batches, Text, count_sequences, load_text, sequences
from sordino import checkpoint
from sordino.algorithms import Algorithm, CaPS, LocalSGD
from sordino.errors import UsageError

_WARM_UP, _LOWEST = 0.05, 0.1  # fraction of all steps; last learning rate, as a fraction of --lr
_LARGEST_NORM = 1.0  # to which gradients are clipped
_ROWS = 32  # sequences per forward pass of an evaluation
_COUNTS = ("tokens", "batch", "context", "layers", "width", "heads", "evaluate_every", "validation_tokens")


def rate(lr: float, step: int, steps: int) -> float:
    """Return the learning rate of step number `step`, from 0, of `steps`: a linear warm-up, then a cosine."""
    rising = max(1, round(_WARM_UP * steps))
    if step < rising:
        return lr * (step + 1) / rising
    return lr * (_LOWEST + (1 - _LOWEST) * (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2)


def needs_a_metric(algorithm: Algorithm) -> bool:
    """Return whether the algorithm adapts itself to the training loss (`report_metric`)."""
    return isinstance(algorithm, CaPS) or (isinstance(algorithm, LocalSGD) and algorithm.adaptive is not None)


def has_outer_parameters(optimizer: Any) -> bool:
    """Return whether the algorithm has outer parameters, as DiLoCo and NoLoCo have."""
    try:
        with optimizer.outer_parameters():
            return True
    except UsageError:
        return False


class Training:
    """Training with its measurements.

    Attributes:
        curve: a point for each evaluation: step, tokens of all ranks, loss in nats per byte, and the bytes sent and the
            seconds of this rank's training steps so far (without evaluations).
    """

    def __init__(self, args: argparse.Namespace, text: Text) -> None:
        self.args = args
        self.steps: int = args.tokens // (args.batch * args.context)
        self.batches = Batches(text.train, args.context, args.batch, args.seed)
        self.held_out = self._sample(text.held_out)
        self.text = text
        gpus = torch.cuda.device_count()
        self.device = torch.device(f"cuda:{hvd.local_rank() % gpus}" if gpus else "cpu")
        self.model = GPT(args.layers, args.width, args.heads, args.context, args.seed).to(self.device)
        self.algorithm = algorithm_of(args)
        self.optimizer = hvd.DistributedOptimizer(
            optimizer_of(self.model, args.optimizer, args.lr, args.weight_decay),
            self.model.named_parameters(),
            algorithm=self.algorithm,
            compression=compression_of(args),
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.has_outer = has_outer_parameters(self.optimizer)
        self.curve: list[dict[str, float]] = []
        self.sent_bytes = 0
        self.seconds = 0.0

    def _sample(self, text: Tensor) -> Tensor:
        """Return sequences for validation, [rows, context + 1] of int64, at equal distances in the held-out text."""
        count, wanted = (
            count_sequences(text, self.args.context),
            max(1, self.args.validation_tokens // self.args.context),
        )
        if count == 0:
            raise UsageError(
                f"the held-out text of {len(text)} bytes has no sequence of --context {self.args.context}. Use more "
                "text, or a smaller context"
            )
        return sequences(text, torch.arange(min(wanted, count)) * count // min(wanted, count), self.args.context)

    def run(self) -> None:
        """Train to the end. Evaluate before the first step, every --evaluate-every steps, and at the end."""
        self.evaluate(0)
        done = 0
        while done < self.steps:
            until = min(self.steps, done + self.args.evaluate_every)
            before, began = hvd.stats()["bytes_sent"], time.perf_counter()
            mean = sum(self.step(number) for number in range(done, until)) / (until - done)
            if until == self.steps:
                self.optimizer.flush()  # applies what some algorithms still have in flight
            self.seconds += time.perf_counter() - began
            self.sent_bytes += int(hvd.stats()["bytes_sent"] - before)
            done = until
            if needs_a_metric(self.algorithm):
                self.optimizer.report_metric(mean)
            self.evaluate(done)

    def step(self, number: int) -> float:
        """Take step `number` on this rank's part of the global batch. Return its loss, in nats per byte."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.args.lr, number, self.steps)
        self.optimizer.zero_grad()
        rows = self.batches.sequences(number, hvd.rank(), hvd.size()).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bfloat16):
            logits = self.model(rows[:, :-1])
        loss = loss_of(logits, rows[:, 1:])
        loss.backward()
        self.optimizer.clip_grad_norm_(_LARGEST_NORM)
        self.optimizer.step()
        hvd.record(step=number + 1, loss=loss)
        return loss.item()

    def recommended(self) -> dict[str, Tensor]:
        """Return the parameters to evaluate: the mean over ranks of the outer parameters, or of the models. Collective.

        The outer parameters of DiLoCo are equal on all ranks, those of NoLoCo differ.
        """
        with self.optimizer.outer_parameters() if self.has_outer else nullcontext():
            return hvd.average_parameters(self.model)

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Add the loss on the held-out sequences, which the ranks divide, to the curve, and print it. Collective."""
        state = self.recommended()
        nats, targets = 0.0, 0
        for rows in self.held_out[share(len(self.held_out), hvd.rank(), hvd.size())].split(_ROWS):
            rows = rows.to(self.device)
            logits = functional_call(self.model, state, (rows[:, :-1],))
            nats += loss_of(logits, rows[:, 1:], "sum").item()
            targets += rows[:, 1:].numel()
        sums = sum_over_ranks({"nats": nats, "targets": targets})
        loss, tokens = sums["nats"] / sums["targets"], step * self.args.batch * self.args.context
        point = {"step": step, "tokens": tokens, "loss": loss, "sent_bytes": self.sent_bytes, "seconds": self.seconds}
        self.curve.append(point)
        hvd.record(validation_loss=loss)
        say(
            f"step {step}/{self.steps}  {tokens:,} tokens  "
            f"loss {loss:.4f} nats ({loss / math.log(2):.4f} bits) per byte  "
            f"sent {self.sent_bytes / 1e6:,.1f} MB  {self.seconds:.1f} s"
        )

    def settings(self) -> dict[str, Any]:
        """Return everything that the curve depends on."""
        return {
            **vars(self.args),
            "written": self.algorithm.written(),
            "world_size": hvd.size(),
            "steps": self.steps,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "train_bytes": len(self.text.train),
            "held_out_bytes": len(self.text.held_out),
            "validation_sequences": len(self.held_out),
            "text_sha256": self.text.sha256(),
            "device": self.device.type,
            "threads_per_rank": torch.get_num_threads(),
            "versions": {module.__name__: module.__version__ for module in (sordino, torch)}
            | {"python": platform.python_version()},
        }


def say(text: str) -> None:
    """Print a line on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. UsageError if one is wrong."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="language.py", description=__doc__, formatter_class=formatter, allow_abbrev=False)
    add = parser.add_argument
    add_algorithm(parser)
    add("--optimizer", default="adamw", choices=("adamw", "muon"), help="optimizer; muon: Muon for the matrices of the "
        "blocks, and AdamW for all other parameters (default: adamw)")  # fmt: skip
    add("--lr", type=float, default=2e-3, help="highest learning rate (default: 0.002)")
    add("--weight-decay", type=float, default=0.1, help="weight decay of matrices (default: 0.1)")
    add("--tokens", type=int, default=1_000_000, help="bytes to train on, all ranks together (default: 1 million)")
    add("--batch", type=int, default=24, help="sequences per step, all ranks together (default: 24)")
    add("--context", type=int, default=128, help="bytes per sequence (default: 128)")
    add("--layers", type=int, default=4, help="blocks of the model (default: 4)")
    add("--width", type=int, default=192, help="width of the model (default: 192)")
    add("--heads", type=int, default=6, help="attention heads per block (default: 6)")
    add("--bfloat16", action="store_true", help="mixed precision: forward and backward in bfloat16 where torch does so")
    add("--text", metavar="FOLDER", help="text files (default: the source code of Python's standard library)")
    add("--seed", type=int, default=1, help="seed of the initial weights and of the order of the text (default: 1)")
    add("--evaluate-every", type=int, metavar="N", help="steps between evaluations (default: a tenth of all steps)")
    add("--validation-tokens", type=int, default=32_768, metavar="N", help="held-out bytes per evaluation "
        "(default: 32768)")  # fmt: skip
    add("--json", metavar="FILE", help="file for the curve and all settings")
    args = parser.parse_on_each_rank(argv)
    for name in _COUNTS:
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    if args.lr <= 0 or args.weight_decay < 0 or args.seed < 0:
        raise UsageError("--lr must be above 0, and --weight-decay and --seed at least 0")
    if args.width % args.heads:
        raise UsageError(f"--width {args.width}: must be a multiple of --heads {args.heads}")
    size = hvd.size()
    if args.batch % size:
        near = -(-args.batch // size) * size
        raise UsageError(
            f"--batch {args.batch}: {size} ranks cannot divide it into equal parts. Use a multiple of {size}, such as "
            f"{near}"
        )
    steps = args.tokens // (args.batch * args.context)
    if steps == 0:
        raise UsageError(
            f"--tokens {args.tokens}: less than one step, which takes {args.batch * args.context} tokens (--batch "
            "times --context)"
        )
    if args.evaluate_every is None:
        args.evaluate_every = max(1, steps // 10)
    if args.json and hvd.rank() == 0 and not Path(args.json).resolve().parent.is_dir():
        raise UsageError(f"--json {args.json}: there is no folder {Path(args.json).resolve().parent}")
    return args


def prepare(argv: Sequence[str] | None) -> Training:
    """Prepare the training up to the first step. If one rank refuses, all ranks refuse."""
    args = together(lambda: parse(argv))
    text = together(lambda: load_text(args.text))
    hashes: list[str] = hvd.allgather_object(text.sha256(), name="language.text")
    if len(set(hashes)) > 1:
        other = next(rank for rank, one in enumerate(hashes) if one != hashes[0])
        raise UsageError(
            f"rank {other} has another text than rank 0. Use the same files on all machines. For the default text use "
            "the same version of Python"
        )
    use_threads()
    return Training(args, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Train. Return the exit status: 0, or 2 if options or files are invalid."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_algorithm(parser)
    hvd.init(algorithm=algorithm_among(parser, argv))
    try:
        training = prepare(argv)
    except UsageError as error:
        return refuse("language.py", error)
    settings = training.settings()
    say(
        f"GPT of {settings['parameters']:,} parameters, {training.args.optimizer}, {settings['written']} "
        f"on {hvd.size()} rank(s); {settings['train_bytes']:,} bytes of text, {settings['held_out_bytes']:,} held out"
    )
    interval = getattr(training.algorithm, "interval", 1)
    if training.has_outer and training.steps % interval:
        say(
            f"note: {training.steps} steps are not a multiple of interval={interval}, so the outer parameters do not "
            f"contain the last {training.steps % interval} steps"
        )
    training.run()
    if training.args.json and hvd.rank() == 0:
        with checkpoint.atomic_file(training.args.json) as file:
            file.write(json.dumps({"settings": settings, "curve": training.curve}, indent=2).encode() + b"\n")
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
