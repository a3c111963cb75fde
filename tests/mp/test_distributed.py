"""torch.distributed's backend "sordino" in jobs of processes (distributed_worker.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checks.commands import SORDINO
from distributed_jobs import assert_well, run
from pace import HANG_S, bound

HEARS_WITHIN_S = 3.0
# torch 2.14 and newer combine backends. Without GPUs, torch can create gloo for CUDA, but not NCCL.
COMBINED = ["cpu:sordino,cuda:gloo"] if torch.__version__ >= (2, 14) else []
BACKENDS = ["sordino", *COMBINED]


@pytest.mark.drill("operations of torch.distributed")
@pytest.mark.parametrize("size", [2, 1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operation(backend: str, size: int, tmp_path: Path) -> None:
    assert_well(run("operations", size, tmp_path, backend=backend))


@pytest.mark.drill("training by torch.distributed")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_are_those_of_gloo(backend: str, size: int, tmp_path: Path) -> None:
    """DDP, FSDP2, HSDP and tensor parallel, with clipping and accumulation."""
    found = {}
    for number, used in enumerate((backend, "gloo")):
        out = tmp_path / f"{number}.json"
        assert_well(run("training", size, tmp_path / f"of {number}", str(out), backend=used))
        found[used] = json.loads(out.read_text())
    for kind, losses in found[backend].items():
        assert losses == pytest.approx(found["gloo"][kind], rel=1e-5), kind
        assert losses[-1] < losses[0]


@pytest.mark.drill("both interfaces")
@pytest.mark.parametrize("first", ["first", "second"])
def test_both_interfaces_have_one_world(first: str, tmp_path: Path) -> None:
    assert_well(run("mixed", 2, tmp_path, first))


def test_a_lost_rank_is_named_on_all_others(tmp_path: Path) -> None:
    outputs = run("lost", 3, tmp_path)
    for rank, output in enumerate(outputs[:2]):
        told = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        assert told["rank"] == rank and "PeerLost" in told["error"] and "rank 2" in told["error"], told
        assert told["seconds"] < bound(HEARS_WITHIN_S), told


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("sordino", init_method="sordino://")
tensor = torch.full((2,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
print("sum", int(tensor[0]), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


def test_an_error_of_one_rank_is_printed_and_told(tmp_path: Path) -> None:
    others = run("failing", 2, tmp_path)
    assert "an error of the script" in others[1] and 'raise RuntimeError("an error' in others[1], others[1]
    assert "DistBackendError" in others[0] and "an error of the script" in others[0], others[0]


@pytest.mark.drill("a store of any launcher")
@pytest.mark.parametrize("size", [3, 1])
def test_ranks_of_any_launcher_meet(size: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script)]
    if size > 1:
        words = [*SORDINO, "run", "--launcher", "local", "-np", str(size), "--", *words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"sum {size * (size + 1) // 2} of {size}"] * size
