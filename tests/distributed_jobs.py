"""Jobs of mp/distributed_worker.py and other workers, started as by torchrun. Ranks without a GPU are forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
from pace import HANG_S

WORKER = Path(__file__).parent / "mp" / "distributed_worker.py"


def run(
    part: str,
    size: int,
    folder: Path,
    *words: str,
    backend: str = "sordino",
    device: str = "cpu",
    worker: Path = WORKER,
    real: bool = False,
    **variables: str,
) -> list[str]:
    """Run the ranks of a job until they end, and return the output of each. With `real`, no rank is a fork."""
    folder.mkdir(exist_ok=True)
    python = forked.python() if device == "cpu" and not real else [sys.executable]
    command = [*python, str(worker), part, str(folder / "store")]
    told = {"SORDINO_TEST_BACKEND": backend, "SORDINO_TEST_DEVICE": device, "SORDINO_TIMEOUT_S": "60", **variables}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | told,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        return [rank.communicate(timeout=HANG_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def assert_well(outputs: list[str]) -> None:
    for rank, output in enumerate(outputs):
        assert f"well {rank}" in output, output
