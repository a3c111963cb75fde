"""Parts of `train.py`'s training: the network, the division of a batch among ranks, and agreement between ranks."""

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
    """Network of two convolutions and two linear layers: 206,922 parameters for 28 x 28 images, 71,754 for 8 x 8.

    It has no batch normalization: its statistics depend on how a batch is divided, so results would depend on the
    number of ranks.
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
        """Return the logits [N, classes] of images [N, 1, H, W]. N may be 0."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def load_data(name: str, data_dir: str | None) -> Dataset:
    """Return the data set called `name`.

    Raises:
        UsageError: a file is missing or damaged, or --data-dir is given for the digits.
    """
    if name == "digits":
        if data_dir is not None:
            raise UsageError("--data-dir: the digits come with scikit-learn; the option is for --data fashion-mnist")
        return load_digits()
    return load_fashion_mnist(data_dir)


def share(rows: int, rank: int, size: int) -> slice:
    """Return the contiguous rows of rank `rank` of `size`. The ranks' numbers of rows differ by at most 1."""
    return slice(rows * rank // size, rows * (rank + 1) // size)


def global_batches(
    rows: int, batch: int, seed: int, epoch: int, first: int
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield the length of each global batch of an epoch, from number `first` on, and this rank's rows of it.

    The order depends on (seed, epoch) only. So one rank or four see the same global batches, and a resumed run finds
    its position without a stored order. The last batch of an epoch may be shorter; no rows are dropped.
    """
    order = np.random.Generator(np.random.PCG64((seed, epoch))).permutation(rows)
    for start in range(first * batch, rows, batch):
        chosen = order[start : start + batch]
        yield len(chosen), chosen[share(len(chosen), hvd.rank(), hvd.size())]


def use_threads() -> int:
    """Give each rank its share of this machine's cores, at least one. Return the number of threads."""
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    torch.set_num_threads(threads)
    return threads


def parameters_sha256(model: nn.Module) -> str:
    """Return a hash of all names, shapes, types and bits of a model. Models are equal bit for bit if the hashes are."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def learning_rate(first: float, steps: int) -> float:
    """Return the rate after `steps` steps: a half of `first` after 400 steps, a third after 800.

    It depends on the step only, so a resumed training needs neither a scheduler's state nor the number of steps. The
    decay makes the accuracy reproducible: with a constant rate, differences in rounding grow to 0.6 percentage points
    on Fashion-MNIST within two epochs; with this rate, to 0.15.
    """
    return first / (1 + steps / 400)


def together(action: Callable[[], T]) -> T:
    """Call `action` on every rank. If it is refused on one rank, it is refused on all ranks.

    Without this, ranks whose machine has a file would wait for ranks whose machine does not have it. `action` must not
    communicate.

    Raises:
        UsageError: on all ranks, with the message of the first rank that refused.
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
    """Print the error on rank 0, in one line, and return the exit status 2.

    All ranks wait until it is printed, because a launcher ends the other ranks as soon as one exits with a status.
    """
    if hvd.rank() == 0:
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    hvd.barrier()
    hvd.shutdown()
    return 2


def sum_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Return each named number summed over the ranks, in float64."""
    total = hvd.allreduce(torch.tensor(list(values.values()), dtype=torch.float64), name="train.sums", op=hvd.Sum)
    return dict(zip(values, total.tolist(), strict=True))
