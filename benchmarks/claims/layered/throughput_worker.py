"""One rank of Figure 4's job, which trains a network on images that it reads from disk.

Rank 0 prints the images per second of all ranks as a line of JSON. A step loads, then runs forward, backward and
`step()`, as in a user's loop.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import sordino.torch as hvd
from cluster import jobs
from sordino.algorithms import Algorithm, AllReduce, Layered
from sordino.report import Results
from sordino.timing import Participants

ALGORITHMS: dict[str, Algorithm] = {"allreduce": AllReduce(), "layered": Layered()}
_SHAPE, _SHRINK = (3, 224, 224), 8
_RECORDS, _BATCH, _WARM_UP = 64, 16, 2


class Images:
    """A file of images. Every batch is read from disk, without the system's cache.

    Args:
        folder: folder of the file.
        seed: seed of the images and their order.
        rate: bytes per second. A faster read waits, as for a slower disk.
    """

    def __init__(self, folder: Path, seed: int, rate: float) -> None:
        self._draw, self._rate = np.random.Generator(np.random.PCG64(seed)), rate
        path = folder / "images"
        with path.open("wb") as file:
            for _ in range(_RECORDS):
                file.write(self._draw.integers(256, size=_SHAPE, dtype=np.uint8).tobytes())
            file.flush()
            os.fsync(file.fileno())
        self._file = os.open(path, os.O_RDONLY)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random images, reduced in size and normalized, and labels."""
        begin = time.perf_counter()
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        images = np.empty((_BATCH, *_SHAPE), np.uint8)
        for place, record in enumerate(self._draw.integers(_RECORDS, size=_BATCH)):
            os.preadv(self._file, [images[place]], int(record) * images[place].nbytes)
        small = nn.functional.avg_pool2d(torch.from_numpy(images).float(), _SHRINK)
        found = (small - 128) / 64, torch.from_numpy(self._draw.integers(10, size=_BATCH))
        time.sleep(max(begin + images.nbytes / self._rate - time.perf_counter(), 0.0))
        return found


def measure(by: str, disk: float, rounds: int, participants: Participants) -> Results:
    """Train; return images per second of all ranks, and whether their parameters agree. Collective."""
    torch.manual_seed(1)
    layers = [nn.Linear(3 * 28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = nn.Sequential(nn.Flatten(), *layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), algorithm=ALGORITHMS[by]
    )
    with tempfile.TemporaryDirectory() as folder:
        images = Images(Path(folder), participants.rank, 1e6 * disk)
        loading = 0.0
        for number in range(_WARM_UP + rounds):
            if number == _WARM_UP:
                participants.barrier()
                begin = time.perf_counter()
                loading = 0.0
            before = time.perf_counter()
            inputs, labels = images.batch()
            loading += time.perf_counter() - before
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        optimizer.flush()
        seconds = participants.maximum(np.array([time.perf_counter() - begin]))[0]
    apart = hvd.consensus_distance(model)
    return {
        "images": float(rounds * _BATCH * participants.size / seconds),
        "loading": float(participants.maximum(np.array([loading]))[0] / seconds),
        "right": apart < 1e-4,
    }


def main() -> int:
    """Run on all ranks."""
    options = argparse.ArgumentParser(prog="throughput_worker", description=__doc__)
    options.add_argument("--by", choices=ALGORITHMS, required=True)
    options.add_argument("--disk", type=float, required=True, metavar="MB/S", help="of a rank's disk")
    options.add_argument("--rounds", type=int, required=True, metavar="N")
    chosen = options.parse_args()
    return jobs.work(lambda participants: measure(chosen.by, chosen.disk, chosen.rounds, participants))


if __name__ == "__main__":
    raise SystemExit(main())
