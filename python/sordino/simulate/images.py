"""Problem with real images: every virtual worker trains a small convolutional network on its own part of the images.

Workers that step at the same virtual time are not batched. With `torch.func.vmap` a step of 16 images of Fashion-MNIST
took 1.5 ms per worker for 8 workers, and 1.7 ms alone (one core). Networks with more channels gained nothing, and
workers seldom step together in modes in which they wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino.data import Dataset, load_digits, load_fashion_mnist
from sordino.errors import UsageError
from sordino.simulate.job import Job

_SEEN = 2000  # test images used for the points of a curve


class Net(nn.Sequential):
    """Network with two convolutions of stride 2 and two linear layers.

    With 16 channels it has 215,370 parameters for 28 x 28 images, 31,050 for 8 x 8. A step of 16 images of
    Fashion-MNIST takes about 2 ms on one core.
    """

    def __init__(self, image_size: int, classes: int, channels: int) -> None:
        cells = (image_size + 3) // 4
        super().__init__(
            nn.Conv2d(1, channels, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 5, stride=2, padding=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(2 * channels * cells * cells, 8 * channels), nn.ReLU(),
            nn.Linear(8 * channels, classes),
        )  # fmt: skip


@cache
def load(data: str, data_dir: str | None) -> Dataset:
    """Return a data set by its name. It is read once."""
    return load_digits() if data == "digits" else load_fashion_mnist(data_dir)


class Trainee:
    """Worker with a network, whose initial parameters are the same on all workers, and an equal part of the images.

    The part is drawn without replacement, and each worker goes through its part in its own order.

    Raises:
        UsageError: the part is smaller than a batch, or the data are missing.
    """

    def __init__(self, job: Job, worker: int) -> None:
        data = load(job.data, job.data_dir)
        given = len(data.train_labels)
        if job.images is not None and job.images > given:
            raise UsageError(f"--images {job.images}: {job.data} has only {given} training images")
        rows = (job.images or given) // job.workers
        if rows < job.batch:
            raise UsageError(
                f"--batch {job.batch}: each of {job.workers} workers has only {rows} images of {job.data}; "
                "give a smaller batch or fewer workers"
            )
        shuffled = np.random.Generator(np.random.PCG64((job.seed, 0))).permutation(len(data.train_labels))
        mine = shuffled[worker * rows : (worker + 1) * rows]
        self._batches = _batches(mine, job.batch, (job.seed, 1, worker))
        self._images, self._labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            self.model = Net(data.image_size, data.classes, job.channels)

    def backward(self) -> None:
        """Add the gradient of the next batch to `grad` of the parameters."""
        chosen = torch.from_numpy(next(self._batches))
        nn.functional.cross_entropy(self.model(self._images[chosen]), self._labels[chosen]).backward()


def _batches(rows: npt.NDArray[np.int64], batch: int, seed: tuple[int, ...]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of rows, pass after pass, each in a new order. A pass leaves out an incomplete last batch."""
    draws = np.random.Generator(np.random.PCG64(seed))
    while True:
        order = draws.permutation(rows)
        for begin in range(0, len(order) - batch + 1, batch):
            yield order[begin : begin + batch]


class Images:
    """`Problem` with the networks of all workers. Parameters are one row of memory per worker, gradients another."""

    def __init__(self, job: Job) -> None:
        self._trainees = [Trainee(job, worker) for worker in range(job.workers)]
        self.size = sum(parameter.numel() for parameter in self._trainees[0].model.parameters())
        self._values = torch.empty(job.workers, self.size)
        self._gradients = torch.zeros(job.workers, self.size)
        self._optimizers = []
        for worker, trainee in enumerate(self._trainees):
            row = nn.Parameter(self._values[worker])
            row.grad = self._gradients[worker]
            _into_rows(trainee.model, row.data, row.grad)
            self._optimizers.append(torch.optim.SGD([row], lr=job.lr, momentum=job.momentum))
        self._alive = dict.fromkeys(range(job.workers))
        data = load(job.data, job.data_dir)
        self._test = torch.from_numpy(data.test_images), torch.from_numpy(data.test_labels)
        order = np.random.Generator(np.random.PCG64((job.seed, 2))).permutation(len(data.test_labels))
        self._seen = torch.from_numpy(np.sort(order[:_SEEN]))
        self._best = -1.0
        self._best_values = self._values.clone()

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters of one network."""
        return 4 * self.size

    def gradient(self, workers: list[int]) -> None:
        for worker in workers:
            self._gradients[worker].zero_()
            self._trainees[worker].backward()

    def step(self, workers: list[int]) -> None:
        for worker in workers:
            self._optimizers[worker].step()

    def leave(self, worker: int) -> None:
        self._alive.pop(worker, None)

    def values(self, worker: int) -> Tensor:
        return self._values[worker]

    def evaluate(self) -> dict[str, float]:
        images, labels = self._test
        accuracy = self._accuracy(images[self._seen], labels[self._seen])
        if accuracy > self._best:
            self._best = accuracy
            self._best_values.copy_(self._values)
        return {"accuracy": accuracy, "consensus_distance": self._distance()}

    def final(self) -> dict[str, float]:
        last = {"accuracy": self._accuracy(*self._test), "consensus_distance": self._distance()}
        now = self._values.clone()
        self._values.copy_(self._best_values)
        best = self._accuracy(*self._test)
        self._values.copy_(now)
        return {**last, "best_accuracy": max(best, last["accuracy"])}

    @torch.no_grad()
    def _accuracy(self, images: Tensor, labels: Tensor) -> float:
        right = 0
        for worker in self._alive:
            model = self._trainees[worker].model
            right += sum(
                int((model(some).argmax(1) == truth).sum())
                for some, truth in zip(images.split(500), labels.split(500), strict=True)
            )
        return right / len(labels) / len(self._alive)

    def _distance(self) -> float:
        rows = self._values[list(self._alive)].double()
        return float((rows - rows.mean(0)).norm(dim=1).mean())


def _into_rows(model: nn.Module, values: Tensor, gradients: Tensor) -> None:
    """Move a model's parameters and their gradients into two rows of memory."""
    begin = 0
    for parameter in model.parameters():
        end = begin + parameter.numel()
        values[begin:end] = parameter.detach().reshape(-1)
        parameter.data = values[begin:end].view_as(parameter)
        parameter.grad = gradients[begin:end].view_as(parameter)
        begin = end
