"""Time that averaging the gradients of a ResNet-50-shaped model adds to a training step.

  mpirun -np 2 python benchmarks/fusion.py      # against Horovod and DDP-gloo
  python benchmarks/fusion.py                   # one rank: the overhead of the wrapper
  mpirun -np 2 python benchmarks/fusion.py --baselines none --rounds 400 --budget 90  # what final gradients cost
  python benchmarks/fusion.py --narrow 16 --compute-ms 30  # 161 small tensors

The model has ResNet-50's 161 parameters. Its backward makes real gradients of their sizes, one by one, and computes for
--compute-ms in between. A step is zero_grad, forward, backward, and step of plain SGD, on one thread per rank if the
ranks fill the cores. Contestants take turns in one run: the same step without communication, with
sordino.torch.DistributedOptimizer (as it is, and with the wait for gradients in step() instead of the end of backward),
with Horovod's optimizer (initialized only in its turns, because its thread slows down the others), and with
DistributedDataParallel over Gloo and over Sordino's backend of torch.distributed, also with buckets in shared memory.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import sordino.torch as hvd
from sordino.bench import baselines, command_line
from sordino.bench.baselines import Baselines
from sordino.bench.report import REPORTS
from sordino.bench.resnet import Model, Work, resnet50_shapes
from sordino.distributed import hooks
from sordino.report import Results, machines, records, verdicts
from sordino.report.tables import format_seconds
from sordino.timing import Participants, Samples, Seconds, Watch, race, summarize

LEARNING_RATE = 1e-6


@dataclass
class Trainer:
    """Model with its optimizer, and the duration of its last backward."""

    model: Model
    forward: Callable[[torch.Tensor], torch.Tensor]
    optimizer: Any
    set_to_none: bool
    backward_seconds: float = 0.0

    def step(self) -> None:
        # The model's zero_grad, not the optimizer's: Horovod's takes no arguments.
        self.model.zero_grad(set_to_none=self.set_to_none)
        loss = self.forward(torch.ones(1, requires_grad=True))
        begin = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        self.backward_seconds = time.perf_counter() - begin
        self.optimizer.step()

    def gradients_are(self, value: float) -> bool:
        """Return whether all elements of all gradients of the last step have this value."""
        grads = [parameter.grad for parameter in self.model.parameters()]
        return all(grad is not None and bool((grad == value).all()) for grad in grads)


def _plain(model: Model, found: Baselines) -> tuple[Any, Any]:
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _sordino(model: Model, found: Baselines) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def _waiting_in_step(trainer: Trainer) -> Callable[[], None]:
    """Return a step that waits for reductions in `step()`, as Horovod's does.

    Reductions still begin in backward. The step uses the usual step's tensors, because their position in memory matters
    more than the place of the wait.
    """
    reducer = trainer.optimizer._strategy.reducer

    def step() -> None:
        reducer._backward_ended = lambda: None
        try:
            trainer.step()
        finally:
            del reducer._backward_ended

    return step


def _horovod(model: Model, found: Baselines) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return model, found.horovod.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def _gloo(model: Model, found: Baselines) -> tuple[Any, Any]:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    return wrapped, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _backend(model: Model, found: Baselines) -> tuple[Any, Any]:
    group = found.gloo.new_group(backend="sordino")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    return wrapped, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _buckets(model: Model, found: Baselines) -> tuple[Any, Any]:
    group = found.gloo.new_group(backend="sordino")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(hooks.SharedBuckets(group), hooks.average)
    return wrapped, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


_MAKERS = {
    "plain": _plain,
    "sordino": _sordino,
    "horovod": _horovod,
    "gloo": _gloo,
    "backend": _backend,
    "buckets": _buckets,
}


def _agree(participants: Participants, fine: bool) -> bool:
    return bool(participants.maximum(np.array([0.0 if fine else 1.0]))[0] == 0)


def prepare(
    names: Sequence[str],
    found: Baselines,
    participants: Participants,
    model: Callable[[], Model],
    set_to_none: bool,
) -> tuple[dict[str, Trainer], dict[str, str]]:
    """Return the trainers with right gradients, and the problem of each other contestant. Collective."""
    trainers: dict[str, Trainer] = {}
    failed: dict[str, str] = {}
    average = (participants.size + 1) / 2
    for name in names:
        problem = ""
        try:
            its_model = model()
            with found.horovod_turn() if name == "horovod" else nullcontext():
                forward, optimizer = _MAKERS[name](its_model, found)
                trainer = Trainer(its_model, forward, optimizer, set_to_none)
                for _ in range(3):
                    trainer.step()
            if not trainer.gradients_are(participants.rank + 1.0 if name == "plain" else average):
                problem = "wrong gradients"
        except Exception as error:
            if name in ("plain", "sordino", "backend", "buckets"):
                raise
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        if _agree(participants, not problem):
            trainers[name] = trainer
        else:
            failed[name] = machines.without_paths(problem or "failed on another rank")
    return trainers, failed


def backward_time(trainer: Trainer, participants: Participants, count: int) -> dict[str, float]:
    """Measure the duration of backward without communication."""
    seconds = []
    for _ in range(count):
        participants.barrier()
        trainer.step()
        seconds.append(trainer.backward_seconds)
    return summarize(participants.maximum(np.array(seconds)))


def exposed(samples: dict[str, Samples], name: str) -> Seconds:
    """Return, for every round, the step with communication minus the step without."""
    return samples[name].round_medians - samples["plain"].round_medians


def measure(
    trainers: dict[str, Trainer], found: Baselines, participants: Participants, budget: float, rounds: int
) -> Results:
    """Run one race, and return the times of each contestant. Collective."""
    runs = {name: one.step for name, one in trainers.items()}
    if participants.size > 1:
        runs["waits in step"] = _waiting_in_step(trainers["sordino"])
    samples = race(runs, participants, budget, rounds=rounds, turns={"horovod": found.horovod_turn})
    entries: Results = {}
    for name, one in samples.items():
        entries[name] = {"step": one.summary()}
        if name != "plain":
            entries[name]["exposed"] = summarize(exposed(samples, name))
    if "waits in step" in samples:  # round by round, because the machine's speed varies by more than the limit
        ours, theirs = (samples[name].round_medians for name in ("sordino", "waits in step"))
        entries["sordino"]["percent_of_waiting_in_step"] = summarize(100 * ours / theirs)
    if participants.rank == 0:
        records.log(", ".join(f"{name} {format_seconds(one.median)}" for name, one in samples.items()))
    return entries


def targets(results: Results) -> list[Results]:
    """Return the requirements: against the baselines for several ranks, against the time of backward for one rank."""
    entries = []
    for key, mode in results["modes"].items():
        if results["ranks"] == 1:
            percent = 100 * mode["contestants"]["sordino"]["exposed"]["median"] / results["backward"]["median"]
            what = f"set_to_none={key}: overhead in percent of backward"
            entries.append(verdicts.target(what, percent, 1.0, at_least=False))
            continue
        percent = mode["contestants"]["sordino"]["percent_of_waiting_in_step"]["median"]
        what = f"set_to_none={key}: a step in percent of one that waits in step(), median of the rounds"
        entries.append(verdicts.target(what, percent, 101.0, at_least=False))
        for name in ("horovod", "gloo"):
            value = None
            if name in mode["contestants"]:
                # Exposed communication of less than 1 us counts as 1 us.
                ours, theirs = (mode["contestants"][key]["exposed"]["median"] for key in ("sordino", name))
                value = theirs / max(ours, 1e-6)
            label = {"horovod": "Horovod", "gloo": "DDP-gloo"}[name]
            what = f"set_to_none={key}: exposed communication less than {label}'s"
            entries.append(verdicts.target(what, value, 8.0, at_least=True))
        if "backend" in mode["contestants"]:
            entries += _backend_targets(key, mode["contestants"])
    return entries


def _backend_targets(key: str, contestants: Results) -> list[Results]:
    """Return the requirements on DistributedDataParallel over Sordino's backend."""
    added = {name: max(entry["exposed"]["median"], 1e-6) for name, entry in contestants.items() if name != "plain"}
    what = f"set_to_none={key}: exposed communication of DDP over Sordino"
    gloo = added["gloo"] / added["backend"] if "gloo" in added else None
    less = verdicts.target(f"{what} less than DDP-gloo's", gloo, 5.0, at_least=True)
    most = added["backend"] / added["sordino"]
    return [less, verdicts.target(f"{what} over that of DistributedOptimizer", most, 1.5, at_least=False)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on all ranks."""
    options = command_line.parser("fusion", __doc__, 40.0, "way of zeroing gradients")
    options.add_argument("--baselines", default="gloo,horovod", metavar="LIST", help="of gloo, horovod; or none")
    options.add_argument(
        "--compute-ms", type=float, default=100.0, metavar="MS", help="computation in a backward (default 100)"
    )
    options.add_argument("--narrow", type=int, default=1, metavar="N", help="divide numbers of channels by (default 1)")
    options.add_argument("--rounds", type=int, help="turns of each contestant, at most (default 20, 60 at one rank)")
    chosen = options.parse_args(argv)
    names = [name for name in baselines.parse_names(chosen.baselines) if name != "mpi"]
    participants, library = baselines.start()
    found_machine, watch = machines.machine(library), Watch(participants)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()) if participants.size > 1 else 1)
    found = baselines.open_all(names, participants)
    work = Work()
    piece = float(participants.maximum(np.array([work.piece_seconds()]))[0])
    pieces = max(0, round(chosen.compute_ms / 1e3 / piece))
    shapes = resnet50_shapes(chosen.narrow)
    name = "fusion_one_rank" if participants.size == 1 else "fusion" if names else "fusion_alone"
    results: Results = {
        "benchmark": "fusion",
        "name": name if chosen.narrow == 1 else f"{name}_narrow",
        "machine": found_machine,
        "ranks": participants.size,
        "tensors": len(shapes),
        "parameters": sum(int(np.prod(shape)) for _, shape in shapes),
        "compute_ms": chosen.compute_ms,
        "modes": {},
    }
    budget = 2.0 if chosen.quick else chosen.budget
    rounds = 3 if chosen.quick else chosen.rounds or (20 if participants.size > 1 else 60)

    entrants = ["plain", "sordino", *[name for name in ("horovod", "gloo") if name in found.found]]
    entrants += ["backend", "buckets"] if "gloo" in entrants else []  # both need its default process group
    for set_to_none in (True, False):
        trainers, failed = prepare(
            entrants, found, participants, lambda: Model(work, pieces, hvd.rank() + 1.0, chosen.narrow), set_to_none
        )
        if set_to_none:
            results["backward"] = backward_time(trainers["plain"], participants, 3 if chosen.quick else 15)
        entries = measure(trainers, found, participants, budget, rounds)
        results["modes"][str(set_to_none)] = {"contestants": entries, "failed": failed}
        del trainers
        gc.collect()
    found_machine["others"] = watch.others()
    found.close()
    if participants.rank == 0:
        results |= {"baselines": found.notes, "targets": targets(results)}
        records.publish(results, command_line.results_folder(chosen), REPORTS)
    hvd.shutdown()
    return 0
