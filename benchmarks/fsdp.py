"""Time that sharding a small GPT by FSDP2 (`fully_shard`) adds to a training step, over Gloo and over Sordino.

  mpirun -np 2 python benchmarks/fsdp.py

A step is forward, backward and SGD on random tokens, on one thread per rank. Contestants take turns in one run: the
whole model on each rank, without communication; and the model sharded over all ranks, over each backend (`shared`: with
buffers in shared memory). All contestants must have the same losses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import sordino.torch as hvd
from sordino.bench import baselines, command_line
from sordino.errors import NotBuilt, SordinoError
from sordino.report import Results, machines, records, verdicts
from sordino.timing import Watch, race, summarize
from timings.fsdp import REPORTS

LAYERS, WIDTH, HEADS, TOKENS, LENGTH, BATCH = 6, 384, 6, 2000, 64, 4
LEARNING_RATE = 1e-3
NAMES = ("gloo", "sordino", "shared")  # contestants that communicate


class Gpt(nn.Module):
    """Decoder with causal attention, of about 12 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.position
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Trainer:
    """A model with its optimizer, sharded over `group` if given; `shares`: in the group's buffers."""

    def __init__(self, group: Any = None, shares: bool = False) -> None:
        torch.manual_seed(1)
        self.model = Gpt()
        if group is not None:
            mesh = DeviceMesh.from_group(group, "cpu")
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            for module in (*self.model.blocks, self.model) if shares else ():
                module.set_allocate_memory_from_process_group_for_comm(True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1))  # the same on all ranks, so all losses are equal

    def step(self) -> float:
        self.optimizer.zero_grad()
        logits = self.model(self.tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on all ranks.

    Raises:
        NotBuilt: there is one rank, or torch has no Gloo.
        SordinoError: losses differ by more than 1e-4.
    """
    options = command_line.parser("fsdp", __doc__, 40.0, "run")
    chosen = options.parse_args(argv)
    participants, library = baselines.start()
    found_machine, watch = machines.machine(library), Watch(participants)
    torch.set_num_threads(1)
    found = baselines.open_all(["gloo"], participants)
    if found.gloo is None:
        raise NotBuilt(f"fsdp compares with Gloo, which {found.notes['gloo']}; use two ranks or more")
    group = found.gloo.new_group(backend="sordino")
    trainers = {
        "plain": Trainer(),
        "gloo": Trainer(found.gloo.group.WORLD),
        "sordino": Trainer(group),
        "shared": Trainer(group, shares=True),
    }
    losses = {name: [one.step() for _ in range(3)] for name, one in trainers.items()}
    for name, values in losses.items():
        if any(abs(value - plain) > 1e-4 for value, plain in zip(values, losses["plain"])):
            raise SordinoError(f"losses of {name} are {values}, those of one rank alone {losses['plain']}")
    runs: dict[str, Callable[[], object]] = {name: one.step for name, one in trainers.items()}
    rounds = 3 if chosen.quick else 20
    samples = race(runs, participants, 1.0 if chosen.quick else chosen.budget, rounds=rounds)
    entries: Results = {name: {"step": one.summary()} for name, one in samples.items()}
    for name in NAMES:
        entries[name]["exposed"] = summarize(samples[name].round_medians - samples["plain"].round_medians)
    found_machine["others"] = watch.others()
    found.close()
    if participants.rank == 0:
        added = {name: max(entries[name]["exposed"]["median"], 1e-6) for name in NAMES}
        results: Results = {
            "benchmark": "fsdp",
            "name": f"fsdp_np{participants.size}",
            "machine": found_machine,
            "ranks": participants.size,
            "parameters": sum(one.numel() for one in trainers["plain"].model.parameters()),
            "contestants": entries,
            "baselines": found.notes,
            "targets": [
                verdicts.target(
                    "FSDP2 of a small GPT: exposed communication less than with Gloo",
                    added["gloo"] / added["sordino"],
                    3.0,
                    at_least=True,
                ),
            ],
        }
        records.publish(results, command_line.results_folder(chosen), REPORTS)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
