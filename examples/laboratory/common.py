"""What `train.py` trains: the network, how the ranks share a batch, and what they must agree on."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import sordino.torch as hvd
from sordino.data import Dataset, load_digits, load_fashion_mnist
from sordino.errors import NotBuilt, UsageError

T = TypeVar("T")


class Net(nn.Module):
    """Two convolutions and two linear layers: 206,922 parameters for 28 x 28 images, 71,754 for 8 x 8.

    No batch normalisation: its statistics depend on how a batch is cut, and then the result would depend on how many
    ranks there are.
    """

    def __init__(self, image_size: int, classes: int) -> None:
        super().__init__()
        # 28 -> 14 -> 7; an 8 x 8 image is halved only once, to keep more than 2 x 2 cells.
        second = 2 if image_size >= 16 else 1
        cells = image_size // 2 // second
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(second),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * cells * cells, 128), nn.ReLU(), nn.Linear(128, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of images [N, 1, H, W]; N may be 0."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def load_data(name: str, data_dir: str | None) -> Dataset:
    """The data set called `name`.

    Raises:
        UsageError: a file is missing or damaged, or --data-dir is given for the digits.
    """
    if name == "digits":
        if data_dir is not None:
            raise UsageError("--data-dir: the digits come with scikit-learn; the option is for --data fashion-mnist")
        return load_digits()
    return load_fashion_mnist(data_dir)


def share(rows: int, rank: int, size: int) -> slice:
    """The rows of rank `rank` when `size` ranks share `rows` of them: contiguous, sizes differing by one at most."""
    return slice(rows * rank // size, rows * (rank + 1) // size)


def global_batches(
    rows: int, batch: int, seed: int, epoch: int, first: int
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """This rank's rows of each global batch of an epoch, from batch number `first` on, and that batch's whole length.

    The order is drawn from (seed, epoch) alone: one rank or four see the same global batches, and a resumed run finds
    its place without having stored any order. The last batch of an epoch may be shorter; none is dropped.
    """
    order = np.random.Generator(np.random.PCG64((seed, epoch))).permutation(rows)
    for start in range(first * batch, rows, batch):
        chosen = order[start : start + batch]
        yield len(chosen), chosen[share(len(chosen), hvd.rank(), hvd.size())]


def use_threads() -> int:
    """Gives each rank its share of this machine's cores, at least one; returns how many threads that is."""
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    torch.set_num_threads(threads)
    return threads


def parameters_sha256(model: nn.Module) -> str:
    """A hash of all names, shapes, types and bits of a model: equal if and only if the models are, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def learning_rate(first: float, steps: int) -> float:
    """The rate after `steps` steps: falls to a half in 400 steps, to a third in 800.

    It depends on nothing but the step, so a resumed training needs no scheduler's state, nor to know its end. That it
    falls is what makes the accuracy reproducible: with a constant rate, differences in rounding grow to 0.6 percentage
    points on Fashion-MNIST within two epochs; with this one, to 0.15.
    """
    return first / (1 + steps / 400)


def together(action: Callable[[], T]) -> T:
    """Does `action` on every rank; if it is refused on one, it is refused on all of them.

    Without this, the ranks whose machine has the file would wait for those whose machine has not. `action` must not
    communicate.

    Raises:
        UsageError: on all ranks, with the message of the first one that refused.
    """
    refusal: str | None = None
    try:
        result = action()
    except (UsageError, NotBuilt) as error:
        refusal = str(error)
    refusals: list[str | None] = hvd.allgather_object(refusal, name="train.together")
    for rank, text in enumerate(refusals):
        if text is not None:
            raise UsageError(text if None not in refusals else f"rank {rank}: {text}")
    return result


def refuse(program: str, error: UsageError) -> int:
    """Rank 0 says why in one line; the exit status is 2.

    All ranks wait until it is said: a launcher ends the others as soon as one rank leaves with a status.
    """
    if hvd.rank() == 0:
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    hvd.barrier()
    hvd.shutdown()
    return 2


def sum_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Sums each named number over the ranks, in float64."""
    total = hvd.allreduce(torch.tensor(list(values.values()), dtype=torch.float64), name="train.sums", op=hvd.Sum)
    return dict(zip(values, total.tolist(), strict=True))
