"""The laboratory: trains a convolutional network on real images, with any of Sordino's algorithms and options.

See minimal.py for the smallest training.

  python examples/train.py                                     one process, scikit-learn's digits
  mpirun -np 3 python examples/train.py
  sordino run -np 4 -- python examples/train.py --data fashion-mnist --epochs 2 --algorithm allreduce
  sordino run -np 4 -- python examples/train.py --algorithm local-sgd --group-size 2 --interval 4
  sordino run -np 5 -- python examples/train.py --algorithm layered --communicator rank
  sordino run -np 4 -- python examples/train.py --recipe large-batch --batch-size 512 --accumulate 2
  sordino run -np 4 -- python examples/train.py --algorithm push-sum --set overlap=1
  sordino run -np 4 -- python examples/train.py --algorithm caps --detector naive --statistics skipped.json
  sordino run -np 4 -- python examples/train.py --algorithm scheduled-pull --set schedule=manager
  sordino run -np 4 --record runs/first -- python examples/train.py ; sordino report runs/first
  sordino run -np 4 --restarts 3 -- python examples/train.py --checkpoint saved/ --checkpoint-every 20 --log steps.jsonl

--batch-size is the *global* batch, whose rows the ranks divide. So 4 ranks compute the same as 1 rank (within rounding)
with the same options, and the learning rate needs no scaling.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Set before torch loads OpenMP, so that waiting threads sleep. Spinning threads are hardly faster on an idle machine.
# With other load on the machine they made this training twenty times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

import sordino
import sordino.torch as hvd
from laboratory import checkpoints, recipes
from laboratory.algorithm import algorithm_of, compression_of
from laboratory.common import (
    Net,
    global_batches,
    load_data,
    parameters_sha256,
    refuse,
    share,
    sum_over_ranks,
    together,
    use_threads,
)
from laboratory.options import algorithm_to_be, parse
from laboratory.progress import Reporter, StepLog
from sordino import checkpoint
from sordino.data import Dataset
from sordino.errors import NotBuilt, UsageError


@dataclass
class Training:
    """State of a training, and the measurements of this run."""

    args: argparse.Namespace
    data: Dataset
    model: Net
    optimizer: Any
    reporter: Reporter
    log: StepLog | None = None
    epoch: int = 0  # epochs completed
    step: int = 0  # steps completed in the current epoch
    saved: bool = True  # whether the last checkpoint was written
    steps_run: int = 0
    images_run: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    bytes_sent: int = 0
    before: dict[str, float] = field(default_factory=dict)  # `hvd.stats()` at the beginning of the current steps
    began: float = 0.0
    epochs_run: list[dict[str, float]] = field(default_factory=list)

    @property
    def steps_per_epoch(self) -> int:
        batch: int = self.args.batch_size
        return -(-len(self.data.train_labels) // batch)

    @property
    def steps_done(self) -> int:
        return self.epoch * self.steps_per_epoch + self.step

    @property
    def models_differ(self) -> bool:
        """Whether each rank has its own model. Then the mean of all models is tested and saved."""
        return hvd.size() > 1 and not algorithm_of(self.args).traits.same_gradients

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that are tested and saved. Collective."""
        return hvd.average_parameters(self.model) if self.models_differ else self.model.state_dict()

    def sent_share(self) -> float:
        """Return the sent fraction of all parameters' bytes, for caps."""
        statistics = self.optimizer.statistics
        return float(statistics.bytes_sent / statistics.bytes_unskipped) if statistics.bytes_unskipped else 0.0

    def finished(self) -> bool:
        limit = self.args.max_steps
        return self.epoch >= self.args.epochs or (limit is not None and self.steps_done >= limit)

    def due(self) -> bool:
        """Return whether a checkpoint is due. At the end of an epoch `run` writes one anyway."""
        every = self.args.checkpoint_every
        return every is not None and self.steps_done % every == 0 and self.step < self.steps_per_epoch

    def run(self) -> None:
        """Train to the end. Write a checkpoint after each epoch and at the end."""
        while not self.finished():
            self.reporter.begin(f"epoch {self.epoch + 1}/{self.args.epochs}", self.step, self.steps_per_epoch)
            loss = self.run_epoch()
            self.reporter.end()
            if self.step == self.steps_per_epoch:
                self.epoch, self.step = self.epoch + 1, 0
            accuracy = self.accuracy()
            epoch = {"steps_done": self.steps_done, "train_loss": loss, "test_accuracy": accuracy}
            text = f"{self.steps_done} steps: train loss {loss:.4f}, test accuracy {accuracy:.2%}"
            if self.models_differ:
                epoch["consensus_distance"] = hvd.consensus_distance(self.model)
                text += f", consensus distance {epoch['consensus_distance']:.3g}"
            if self.args.algorithm == "caps":
                self.optimizer.report_metric(loss)
                text += f", {self.sent_share():.0%} of the parameters sent"
            hvd.record(test_accuracy=accuracy)
            self.epochs_run.append(epoch)
            self.reporter.say(text)
            self.save()

    def run_epoch(self) -> float:
        """Train to the end of the epoch or to --max-steps. Return the mean loss over all images of all ranks."""
        args, images, labels = self.args, self.data.train_images, self.data.train_labels
        loss_sum, images_seen = 0.0, 0
        self.begin_to_measure()
        for rows, mine in global_batches(len(labels), args.batch_size, args.seed, self.epoch, self.step):
            for group in self.optimizer.param_groups:
                group["lr"] = recipes.rate(args, self.steps_done, args.epochs * self.steps_per_epoch)
            self.optimizer.zero_grad()
            batch_loss = 0.0
            for part in np.array_split(mine, args.accumulate):
                with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
                    logits = self.model(torch.from_numpy(images[part]))
                target = torch.from_numpy(labels[part])
                loss = nn.functional.cross_entropy(
                    logits.float(), target, reduction="sum", label_smoothing=args.label_smoothing
                )
                # The ranks' gradients are averaged. If each rank's sum of losses is divided by (rows / ranks), that
                # average is the gradient of the mean over the global batch, for any numbers of rows, including 0.
                (loss * (hvd.size() / rows)).backward()
                batch_loss += loss.item()
            self.optimizer.step()
            loss_sum += batch_loss
            images_seen += len(mine)
            self.step += 1
            self.steps_run += 1
            self.images_run += rows
            mean = batch_loss / max(len(mine), 1)
            self.reporter.step(mean, rows)
            hvd.record(step=self.steps_done, loss=mean)
            if self.log and hvd.rank() == 0:
                self.log.step(self.steps_done, mean, hvd.size())
            if self.steps_done == args.max_steps:
                break
            if self.due():
                self.measure()
                self.save()
                self.begin_to_measure()
        self.measure()
        sums = sum_over_ranks({"loss": loss_sum, "images": images_seen})
        return sums["loss"] / sums["images"]

    def begin_to_measure(self) -> None:
        """Start to measure steps, so that evaluations and checkpoints are not counted."""
        self.before, self.began = hvd.stats(), time.perf_counter()

    def measure(self) -> None:
        """Add the time and the bytes of the steps since `begin_to_measure`."""
        after = hvd.stats()
        self.seconds += time.perf_counter() - self.began
        self.exposed_seconds += after["exposed_seconds"] - self.before["exposed_seconds"]
        self.bytes_sent += int(after["bytes_sent"] - self.before["bytes_sent"])

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the accuracy on the test images, which the ranks divide."""
        state = self.parameters()
        while True:
            mine = share(len(self.data.test_labels), hvd.rank(), hvd.size())
            images, labels = (torch.from_numpy(part[mine]) for part in (self.data.test_images, self.data.test_labels))
            guesses = torch.cat([functional_call(self.model, state, chunk).argmax(1) for chunk in images.split(500)])
            sums = sum_over_ranks({"right": float((guesses == labels).sum()), "seen": len(labels)})
            # If a rank was lost meanwhile, its part is missing, and the remaining ranks divide all images again.
            if sums["seen"] == len(self.data.test_labels):
                return sums["right"] / sums["seen"]

    def save(self) -> None:
        """Write the checkpoint on rank 0, if requested. If models differ, training resumes from their mean."""
        if not self.args.checkpoint:
            return
        model, optimizer = self.parameters(), self.optimizer.state_dict()  # collective if ranks have parts of it
        if hvd.rank() == 0:
            state = {
                "model": model,
                "optimizer": optimizer,
                "epoch": self.epoch,
                "step": self.step,
                "rng": torch.get_rng_state(),
            }
            self.saved = checkpoints.write(self.args, self.steps_done, state)

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from the checkpoint `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.step = state["epoch"], state["step"]
        torch.set_rng_state(state["rng"])
        hvd.record(step=self.steps_done)
        self.reporter.say(f"continuing from {self.args.checkpoint} after {self.steps_done} steps")
        if state["world_size"] != hvd.size():
            same = algorithm_of(self.args).traits.same_gradients
            effect = "equal within rounding, not bit for bit" if same else "others, because the algorithm depends on it"
            self.reporter.say(
                f"note: the checkpoint was written by {state['world_size']} ranks, but now there are {hvd.size()}: "
                f"results are {effect}"
            )

    def results(self, accuracy: float) -> dict[str, Any]:
        """Return the summary, the same on all ranks. Collective."""
        steps, size = max(self.steps_run, 1), hvd.size()
        mean = sum_over_ranks({"exposed": self.exposed_seconds / size, "bytes": self.bytes_sent / size})
        hashes: list[str] = hvd.allgather_object(parameters_sha256(self.model), name="train.hashes")
        return {
            "test_accuracy": accuracy,
            "images_per_second": self.images_run / self.seconds if self.seconds else 0.0,
            "exposed_ms_per_step": mean["exposed"] * 1e3 / steps,
            "bytes_sent_per_worker_per_step": mean["bytes"] / steps,
            "steps": self.steps_run,
            "steps_done": self.steps_done,
            "epochs_done": self.epoch,
            "train_seconds": self.seconds,
            "epochs": self.epochs_run,
            "world_size": size,
            "threads_per_rank": torch.get_num_threads(),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "parameters_sha256": hashes[0],
            "replicas_equal": len(set(hashes)) == 1,
            "args": vars(self.args),
            "versions": {module.__name__: module.__version__ for module in (sordino, torch, np)}
            | {"python": platform.python_version()},
        }


def prepare(argv: Sequence[str] | None) -> Training:
    """Prepare the training up to the first step. If one rank refuses, all ranks refuse."""
    args = together(lambda: parse(argv, __doc__ or ""))
    data = together(lambda: load_data(args.data, args.data_dir))
    state = checkpoints.read(args)
    use_threads()
    torch.manual_seed(args.seed)
    model = Net(data.image_size, data.classes)
    optimizer = hvd.DistributedOptimizer(
        recipes.optimizer(args, model.parameters()),
        named_parameters=model.named_parameters(),
        algorithm=algorithm_of(args),
        compression=compression_of(args),
        backward_passes_per_step=args.accumulate,
    )
    reporter = Reporter(speaks=lambda: hvd.rank() == 0)
    training = Training(args, data, model, optimizer, reporter, StepLog(args.log) if args.log else None)
    if state:
        training.resume(state)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return training


def report(training: Training, results: dict[str, Any]) -> None:
    """Print the results on rank 0, and write the file that --json names."""
    args, say = training.args, training.reporter.say
    ranks = f"{results['world_size']} rank{'s' if results['world_size'] > 1 else ''}"
    say(f"{args.algorithm} on {args.data}, {ranks} x {results['threads_per_rank']} threads")
    say(f"  test accuracy          {results['test_accuracy']:.2%}")
    say(f"  images/s               {results['images_per_second']:,.0f}")
    say(f"  exposed communication  {results['exposed_ms_per_step']:.3f} ms per step")
    say(f"  sent                   {results['bytes_sent_per_worker_per_step']:,.0f} bytes per worker and step")
    if args.statistics and hvd.rank() == 0:
        training.optimizer.statistics.save(args.statistics)
        picture = Path(args.statistics).with_suffix(".png")
        try:
            training.optimizer.statistics.plot(picture)
        except NotBuilt as error:
            say(f"no {picture}: {error}")
    if args.json and hvd.rank() == 0:
        with checkpoint.atomic_file(args.json) as file:
            file.write(json.dumps(results, indent=2).encode() + b"\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Train. Return the exit status: 0, 1 if the last checkpoint was not saved, 2 if options or files are invalid."""
    try:
        hvd.init(algorithm=algorithm_to_be(argv))
    except UsageError as error:
        hvd.init()
        return refuse("train.py", error)
    try:
        training = prepare(argv)
    except UsageError as error:
        return refuse("train.py", error)
    with training.reporter:
        training.run()
    last = training.epochs_run[-1]["test_accuracy"] if training.epochs_run else training.accuracy()
    report(training, training.results(last))
    hvd.shutdown()
    return 0 if training.saved else 1


if __name__ == "__main__":
    sys.exit(main())
