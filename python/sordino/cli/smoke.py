"""Program of `sordino doctor` for two ranks: one all-reduce of known numbers, which each rank checks."""

from __future__ import annotations

import sys


def main() -> int:
    """Return 0 if the average over the ranks is right."""
    import torch

    import sordino.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    mean = hvd.allreduce(torch.full((1000,), float(rank)), name="sordino.doctor", op=hvd.Average)
    right = bool((mean == (size - 1) / 2).all())
    if rank == 0:
        print(f"ranks={size} " + ("right" if right else f"wrong: {mean[:4].tolist()}"), flush=True)
    hvd.shutdown()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
