"""Run checks on ranks as threads whose GPU is the stand-in for CUDA: `python run_checks.py FOLDER`.

FOLDER/checks has a line per check: the name of the world, a space, the name of the check. FOLDER/results.jsonl gets a
line when a check begins, and one with its outcome.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checks.registry import Check, all_checks, compare
from checks.worlds import DEVICES, World
from pretended import built_stand_in_for_nccl
from stand_in import use_for_nccl

from sordino import sim
from sordino._core import Device, cuda_device

STUCK_S = 240


def gpus(world: World) -> list[Device]:
    """Return the GPUs of a world's ranks; set the environment for its route, as pretended.devices does."""
    os.environ["SORDINO_GPU_ROUTE"] = "host" if world.kind == "staged" else ""
    if world.kind != "nccl":
        os.environ["SORDINO_NCCL"] = "off"  # a PyTorch with CUDA brings one, which would stay for later worlds
        return [cuda_device(0)]
    fake = built_stand_in_for_nccl()
    assert fake is not None, "needs libfake_nccl.so: `make test` builds it"
    use_for_nccl(fake)
    os.environ["SORDINO_NCCL"] = str(fake)
    return [cuda_device(number) for number in range(world.ranks)]


def run(world: World, check: Check, folder: Path) -> None:
    folder.mkdir()
    options = {"ranks_per_node": world.per_node, "algorithm": check.algorithm(world.ranks), "devices": gpus(world)}
    compare(sim.run(world.ranks, check.run, "sim", str(folder), **options))


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ.setdefault("SORDINO_TIMEOUT_S", "60")
    torch.set_num_threads(1)
    worlds, checks = {str(world): world for world in DEVICES}, all_checks()
    for number, line in enumerate((folder / "checks").read_text().splitlines()):
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        world, name = line.split(" ", 1)
        error, begin = None, time.monotonic()
        with open(folder / "results.jsonl", "a") as report:
            print(json.dumps({"begin": line}), file=report, flush=True)
            try:
                run(worlds[world], checks[name], folder / f"scratch{number}")
            except BaseException:
                error = traceback.format_exc()
            outcome = {"check": line, "error": error, "seconds": round(time.monotonic() - begin, 3)}
            print(json.dumps(outcome), file=report, flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
