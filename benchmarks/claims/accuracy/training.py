"""One training of the accuracy benchmark: a small network on ranks that are threads, and how good their mean became."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import torch
from torch import nn

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import Algorithm, AllReduce, Crossover, LocalSGD, PushSum
from sordino.data import load_digits, load_fashion_mnist
from sordino.report import Results

WARM_UP = 0.1  # of the steps
INTERVAL = 8  # of local SGD
_STEP = 200  # images that take as long as what else a worker does in a step

Part = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """What all trainings of a benchmark have in common.

    Attributes:
        data: "fashion-mnist" or "digits".
        images: of the training part, that are trained on.
        held_out: others of the training part, for validation.
    """

    data: str
    images: int
    held_out: int
    epochs: int
    momentum: float = 0.9


@dataclass(frozen=True)
class Training:
    """What one training has for itself.

    Attributes:
        batch: the global mini-batch; the workers share it evenly.
        lr: the learning rate after the warm-up.
        start: what part of it the warm-up begins with.
        seed: of the initial parameters, the order of the images and the choice of peers.
    """

    algorithm: str
    workers: int
    batch: int
    lr: float
    seed: int
    start: float = 0.1

    @property
    def key(self) -> str:
        """Names the training among those of a task."""
        return f"{self.algorithm}-{self.workers}w-{self.batch}b-{self.lr:g}lr-{self.seed}"

    def steps(self, task: Task) -> int:
        """Of the optimizer; images that do not fill a mini-batch are left out of their epoch."""
        return task.epochs * (task.images // self.batch)

    def cost(self, task: Task) -> float:
        """How long it takes, in images."""
        return self.steps(task) * (self.batch + _STEP * self.workers)


def group_size(workers: int) -> int:
    """Of hierarchical Crossover: groups of two, and larger ones where that leaves more than four groups."""
    return max(2, workers // 4)


def make_algorithm(name: str, workers: int, seed: int) -> Algorithm:
    """The contestant called `name`."""
    if name == "sgp":
        return PushSum()
    if name == "crossover":
        return Crossover(seed=seed)
    if name == "hierarchical":
        return Crossover(group_size=group_size(workers), seed=seed)
    if name == "local-sgd":
        return LocalSGD(INTERVAL, log_distance=INTERVAL)
    return AllReduce()


@cache
def load(data: str, data_dir: str | None, images: int, held_out: int) -> dict[str, Part]:
    """Images and labels to train on, to choose learning rates by ("validation") and to test with."""
    found = load_digits() if data == "digits" else load_fashion_mnist(data_dir)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(found.train_labels))

    def part(rows: slice) -> Part:
        return torch.from_numpy(found.train_images[order[rows]]), torch.from_numpy(found.train_labels[order[rows]])

    test = torch.from_numpy(found.test_images), torch.from_numpy(found.test_labels)
    return {"train": part(slice(held_out, held_out + images)), "validation": part(slice(held_out)), "test": test}


def make_model(image_size: int, seed: int) -> nn.Sequential:
    """Three linear layers, each a segment of Crossover's: 109,386 parameters for 28 x 28 images."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(image_size**2, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def train(task: Task, training: Training, data_dir: str | None = None) -> Results:
    """Trains on `training.workers` threads.

    Returns:
        The accuracies of the mean model, the consensus distance after every epoch, for local SGD the distance before
        every averaging (None where parameters have diverged), and what it took.
    """
    data = load(task.data, data_dir, task.images, task.held_out)
    model = make_model(data["train"][0].shape[2], training.seed)
    begin = time.perf_counter()
    found = sim.run(training.workers, _work, task, training, data, model)[0]
    seconds = time.perf_counter() - begin
    return {**asdict(training), "steps": training.steps(task), **found, "seconds": seconds}


def _work(task: Task, training: Training, data: dict[str, Part], initial: nn.Module) -> Results:
    """What every worker does."""
    torch.set_num_threads(1)
    images, labels = data["train"]
    model = copy.deepcopy(initial)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=training.lr, momentum=task.momentum),
        named_parameters=model.named_parameters(),
        algorithm=make_algorithm(training.algorithm, training.workers, training.seed),
    )
    steps = training.steps(task)
    warm_up = int(WARM_UP * steps)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps - warm_up, 1))
    scheduler = hvd.GradualWarmup(optimizer, warm_up, start_factor=training.start, after=cosine)
    share = training.batch // training.workers
    distances = []
    for epoch in range(task.epochs):
        order = np.random.Generator(np.random.PCG64((training.seed, epoch))).permutation(len(labels))
        for first in range(hvd.rank() * share, len(labels) // training.batch * training.batch, training.batch):
            mine = torch.from_numpy(order[first : first + share])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
            scheduler.step()
        distances.append(_finite(hvd.consensus_distance(model)))
    model.load_state_dict(hvd.average_parameters(model))
    if hvd.rank() != 0:
        return {}
    accuracies = {name: accuracy_of(model, data[name]) for name in ("validation", "test")}
    local = [_finite(distance) for _, distance in optimizer.distances]
    return {**accuracies, "consensus_distance": distances, **({"local_distances": local} if local else {})}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@torch.no_grad()
def accuracy_of(model: nn.Module, part: Part) -> float:
    """The share of images that a model knows."""
    images, labels = part
    guesses = torch.cat([model(chunk).argmax(1) for chunk in images.split(500)])
    return float((guesses == labels).sum()) / len(labels)
