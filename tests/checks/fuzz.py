"""Run random programs of collectives (programs.py) for a given time: `python tests/checks/fuzz.py [--minutes M]`.

Each program has a seed and a layout: 1 to 8 ranks as threads, on 1 to 4 nodes of different sizes. A failure is printed
with both; `--seed S --nodes 0,0,1` repeats it. The status is 1 if anything has failed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import sordino.torch as hvd
from checks.programs import Program
from checks.registry import Seat, compare, wait_for_leftovers
from sordino import sim
from sordino._core import SimNetwork


def layout(seed: int) -> list[int]:
    """Return the node of each rank; ranks of a node are adjacent."""
    draw = random.Random(seed)
    size = draw.randint(1, 8)
    return sorted(draw.randrange(draw.randint(1, 4)) for _ in range(size))


def run(seed: int, nodes: list[int]) -> None:
    numbered = [sorted(set(nodes)).index(node) for node in nodes]

    def body(folder: str) -> list[tuple[str, str]]:
        seat = Seat(hvd.rank(), hvd.size(), "sim", folder)
        Program(seat, seed).run()
        wait_for_leftovers()
        return seat.log

    with tempfile.TemporaryDirectory() as folder:
        compare(sim.run(len(nodes), body, folder, network=SimNetwork(numbered)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to go on, default %(default)s")
    parser.add_argument("--first", type=int, default=1000, help="seed of the first program, default %(default)s")
    parser.add_argument("--seed", type=int, help="this program alone")
    parser.add_argument("--nodes", help="with --seed: the node of each rank, such as 0,0,1")
    options = parser.parse_args()
    os.environ.setdefault("SORDINO_TIMEOUT_S", "60")
    torch.set_num_threads(1)
    if options.seed is not None:
        run(options.seed, [int(node) for node in options.nodes.split(",")] if options.nodes else layout(options.seed))
        return 0
    end, failed, seed = time.monotonic() + 60 * options.minutes, 0, options.first
    while time.monotonic() < end:
        nodes = layout(seed)
        try:
            run(seed, nodes)
        except Exception:
            failed += 1
            print(f"FAILED: --seed {seed} --nodes {','.join(map(str, nodes))}\n{traceback.format_exc()}", flush=True)
        seed += 1
    print(f"{seed - options.first} programs, seeds {options.first} to {seed - 1}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
