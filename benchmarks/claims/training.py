"""One training of a small network by any algorithm, on threads as ranks; and the mean model's accuracy.

Claims about accuracy share this module, so they differ only in the compared algorithms. A seed determines the
initial parameters, the order of the images and the peers, and is the same for every algorithm.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

import sordino.torch as hvd
from claims.claim import Run
from sordino import sim
from sordino.algorithms import registry
from sordino.data import load_digits, load_fashion_mnist
from sordino.report import Results

_STEP = 200  # fixed cost of a worker's step, in images

Part = tuple[torch.Tensor, torch.Tensor]


@cache
def load(data: str, images: int, held_out: int) -> dict[str, Part]:
    """Return images [N, 1, H, W] and labels [N] of the parts "train", "validation" (to choose settings) and "test"."""
    found = load_digits() if data == "digits" else load_fashion_mnist(None)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(found.train_labels))

    def part(rows: slice) -> Part:
        return torch.from_numpy(found.train_images[order[rows]]), torch.from_numpy(found.train_labels[order[rows]])

    test = torch.from_numpy(found.test_images), torch.from_numpy(found.test_labels)
    return {"train": part(slice(held_out, held_out + images)), "validation": part(slice(held_out)), "test": test}


def linear_layers(image_size: int, width: int, seed: int) -> nn.Sequential:
    """Return three linear layers, each a segment of Crossover: 52,650 parameters for 28 x 28 images, width 64."""
    torch.manual_seed(seed)
    half = width // 2
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(image_size**2, width), nn.ReLU()),
        *(nn.Linear(width, half), nn.ReLU(), nn.Linear(half, 10)),
    )


@dataclass(frozen=True)
class Recipe:
    """Settings of the optimizer and the learning rate.

    Attributes:
        warm_up: share of the steps in which the learning rate rises; then it falls as a cosine to zero.
        smoothing: label smoothing.
        momentum: momentum of the optimizer.
        layerwise: whether the optimizer is LARS and not SGD.
    """

    warm_up: float = 0.1
    smoothing: float = 0.0
    momentum: float = 0.9
    layerwise: bool = False

    def optimizer_of(self, model: nn.Module, lr: float, momentum: float | None) -> torch.optim.Optimizer:
        """Return the optimizer to wrap. `momentum` replaces the recipe's unless it is None."""
        momentum = self.momentum if momentum is None else momentum
        if not self.layerwise:
            return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        return hvd.LARS(model.parameters(), lr=lr, momentum=momentum, weight_decay=5e-5, trust_coefficient=0.0025)


RECIPES = {"sgd": Recipe(), "large-batch": Recipe(36 / 90, 0.1, 0.96, True)}
"""Recipes by name. "large-batch" is Table 1 of Crossover-SGD and `examples/train.py --recipe large-batch`."""


@dataclass(frozen=True)
class Training:
    """Settings of one training.

    Attributes:
        algorithm: a name of `sordino.algorithms`.
        workers: number of workers.
        batch: images of the global mini-batch, which the workers share evenly.
        lr: learning rate after the warm-up.
        seed: seed of the initial parameters, the order of the images and the choice of peers.
        data: "digits" or "fashion-mnist".
        images: number of training images.
        held_out: number of other images, for validation.
        epochs: passes over the images. Images that do not fill a mini-batch are left out.
        options: settings of the algorithm.
        width: width of the network's first layer.
        momentum: momentum of the optimizer; None: the recipe's.
        start: share of the learning rate with which the warm-up begins.
        recipe: a key of RECIPES.
    """

    algorithm: str
    workers: int
    batch: int
    lr: float
    seed: int
    data: str
    images: int
    held_out: int
    epochs: int
    options: Results = field(default_factory=dict)
    width: int = 64
    momentum: float | None = None
    start: float = 0.1
    recipe: str = "sgd"

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self.epochs * (self.images // self.batch)

    @property
    def run(self) -> Run:
        """The training as a run, with its cost in images."""
        return Run("claims.training:train", asdict(self), self.steps * (self.batch + _STEP * self.workers))


def train(**settings: Any) -> Results:
    """Carry out a training, one thread per worker.

    Returns:
        The mean model's accuracies (0 to 1); the number of steps; the consensus distance after each epoch; and with
        `log_distance` the distance before each averaging. A distance is None if parameters have diverged.
    """
    training = Training(**settings)
    parts = load(training.data, training.images, training.held_out)
    model = linear_layers(parts["train"][0].shape[2], training.width, training.seed)
    found: Results = sim.run(training.workers, _work, training, parts, model)[0]
    return found | {"steps": training.steps}


def _work(training: Training, parts: dict[str, Part], initial: nn.Module) -> Results:
    """Train on one worker."""
    torch.set_num_threads(1)
    images, labels = parts["train"]
    model = copy.deepcopy(initial)
    recipe = RECIPES[training.recipe]
    optimizer = hvd.DistributedOptimizer(
        recipe.optimizer_of(model, training.lr, training.momentum),
        named_parameters=model.named_parameters(),
        algorithm=registry.class_of(training.algorithm)(**training.options),
    )
    warm_up = int(recipe.warm_up * training.steps)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(training.steps - warm_up, 1))
    scheduler = hvd.GradualWarmup(optimizer, warm_up, start_factor=training.start, after=cosine)
    batch, share = training.batch, training.batch // training.workers
    distances = []
    for epoch in range(training.epochs):
        order = np.random.Generator(np.random.PCG64((training.seed, epoch))).permutation(len(labels))
        for first in range(hvd.rank() * share, len(labels) // batch * batch, batch):
            mine = torch.from_numpy(order[first : first + share])
            optimizer.zero_grad()
            guesses = model(images[mine])
            nn.functional.cross_entropy(guesses, labels[mine], label_smoothing=recipe.smoothing).backward()
            optimizer.step()
            scheduler.step()
        distances.append(_finite(hvd.consensus_distance(model)))
    model.load_state_dict(hvd.average_parameters(model))
    if hvd.rank() != 0:
        return {}
    found = {name: accuracy_of(model, parts[name]) for name in ("validation", "test")}
    local = {}
    if training.options.get("log_distance"):
        local = {"local_distances": [_finite(distance) for _, distance in optimizer.distances]}
    return {**found, "consensus_distance": distances, **local}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@torch.no_grad()
def accuracy_of(model: nn.Module, part: Part) -> float:
    """Return the share of images that a model classifies correctly."""
    images, labels = part
    guesses = torch.cat([model(chunk).argmax(1) for chunk in images.split(500)])
    return float((guesses == labels).sum()) / len(labels)
