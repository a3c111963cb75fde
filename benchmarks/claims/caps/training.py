"""One training with parameter skipping, on ranks that are threads: changes of each layer and bytes sent, by epoch."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import sordino.torch as hvd
from claims.caps.networks import Dropout, layers_of, make_network
from claims.claim import Run
from claims.training import Part, accuracy_of, load
from sordino import sim
from sordino.algorithms import Algorithm, ThresholdScheduler, registry
from sordino.report import Results

WORKERS, BATCH = 4, 32  # number of workers; images in a worker's mini-batch, as in the source
FULL: dict[str, Any] = {"data": "fashion-mnist", "images": 2048}
QUICK: dict[str, Any] = {"data": "digits", "images": 512}
RATES = {"momentum": 0.05, "plain": 0.05, "adam": 0.001}
_HELD_OUT = 256
_NEVER = 1 << 30  # steps, so that the statistics have one point per epoch


@dataclass(frozen=True)
class Training:
    """Settings of one training.

    Attributes:
        seed: seed of the initial parameters, dropout and the order of the images.
        epochs: passes over the images.
        data: "digits" or "fashion-mnist".
        images: number of training images, a multiple of the global mini-batch.
        algorithm: a name of `sordino.algorithms`.
        options: settings of the algorithm. Its scheduler's settings are a dict.
        network: kind of `make_network`.
        optimizer: "momentum" or "plain" (SGD), or "adam"; its learning rate is in `RATES`.
        decays: whether the learning rate warms up in a tenth of the steps and then falls as a cosine. Otherwise it is
            constant.
        metric: loss that is reported after an epoch: "last" (last mini-batch), "mean" (mean of the epoch) or
            "validation" (images held out).
    """

    seed: int
    epochs: int
    data: str
    images: int
    algorithm: str = "caps"
    options: Results = field(default_factory=dict)
    network: str = "convolutional"
    optimizer: str = "momentum"
    decays: bool = False
    metric: str = "mean"

    @property
    def run(self) -> Run:
        """The training as a run."""
        return Run("claims.caps.training:train", asdict(self), self.epochs * self.images)

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self.epochs * (self.images // (WORKERS * BATCH))

    def algorithm_of(self) -> Algorithm:
        """Return the algorithm."""
        options = dict(self.options)
        if "scheduler" in options:
            options["scheduler"] = ThresholdScheduler(**options["scheduler"])
        if self.algorithm == "caps":
            options["statistics_interval"] = _NEVER
        return registry.class_of(self.algorithm)(**options)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer to wrap."""
        lr = RATES[self.optimizer]
        if self.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), lr=lr)
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9 if self.optimizer == "momentum" else 0.0)


def all_equal(model: nn.Module) -> bool:
    """Return whether all ranks have the same parameters, bit for bit. Collective."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return len(set(hvd.allgather_object(digest.hexdigest(), name="claims.hashes"))) == 1


def train(**settings: Any) -> Results:
    """Carry out a training, one thread per worker.

    Returns:
        The test accuracy in percent; whether all ranks ended with equal parameters; the mean loss and the consensus
        distance of each epoch; and with parameter skipping, in percent, the threshold, the share of bytes sent and the
        share of unchanged elements of each layer.
    """
    training = Training(**settings)
    parts = load(training.data, training.images, _HELD_OUT)
    model = make_network(training.network, parts["train"][0].shape[2], training.seed)
    found: Results = sim.run(WORKERS, _work, training, parts, model)[0]
    return found


def _work(training: Training, parts: dict[str, Part], initial: nn.Module) -> Results:
    """Train on one worker."""
    torch.set_num_threads(1)
    images, labels = parts["train"]
    model = copy.deepcopy(initial)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.begin(training.seed * WORKERS + hvd.rank())
    inner, algorithm = training.optimizer_of(model), training.algorithm_of()
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), algorithm=algorithm)
    scheduler: Any = None
    if training.decays:
        warm_up = training.steps // 10
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(training.steps - warm_up, 1))
        scheduler = hvd.GradualWarmup(optimizer, warm_up, start_factor=0.1, after=cosine)
    found: Results = {"loss": [], "distance": []}
    for epoch in range(training.epochs):
        order = np.random.Generator(np.random.PCG64((training.seed, epoch))).permutation(len(labels))
        losses = []
        for first in range(hvd.rank() * BATCH, len(labels), WORKERS * BATCH):
            mine = torch.from_numpy(order[first : first + BATCH])
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            losses.append(loss.item())
        found["loss"].append(float(np.mean(losses)))
        found["distance"].append(float(hvd.consensus_distance(model)))
        if training.algorithm == "caps":
            optimizer.report_metric(_metric(training.metric, losses, model, parts["validation"]))
    if training.algorithm == "caps":
        optimizer.flush()
        found |= _told(optimizer.statistics.as_dict(), layers_of(model))
    found["equal"] = all_equal(model)
    model.load_state_dict(hvd.average_parameters(model))  # statistics of batch normalization differ by rank
    model.eval()
    return found | {"test": 100 * accuracy_of(model, parts["test"])} if hvd.rank() == 0 else {}


def _metric(name: str, losses: list[float], model: nn.Module, validation: Part) -> float:
    if name != "validation":
        return losses[-1] if name == "last" else float(np.mean(losses))
    model.eval()
    images, labels = (one[hvd.rank() :: WORKERS] for one in validation)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images), labels)
    model.train()
    return float(loss)


def _told(statistics: Results, layers: list[str]) -> Results:
    """Summarize the statistics of parameter skipping."""
    points = statistics["points"]
    places = {one["name"]: index for index, one in enumerate(statistics["tensors"])}
    return {
        "threshold": [one["threshold"] for one in points],
        "sent": [100 * one["bytes_sent"] / one["bytes_unskipped"] for one in points],
        "sent_in_all": 100 * statistics["bytes_sent"] / statistics["bytes_unskipped"],
        "unchanged": {name: [100 * one["ratios"][places[name]] for one in points] for name in layers},
    }
