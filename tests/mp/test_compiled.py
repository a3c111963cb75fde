"""Compiled code: collectives on one rank, and models and collectives with torch's default compiler. It needs a C++
compiler, which every machine that built Sordino has. Other jobs are in checks/compiled.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checks.commands import SORDINO
from checks.compiled import in_one_graph
from checks.registry import Seat
from pace import HANG_S

from sordino import sim

SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import sordino.torch as hvd
from checks.compiled import in_one_graph, train_compiled
from checks.registry import Seat
hvd.init()
seat = Seat(hvd.rank(), hvd.size(), "processes", "")
train_compiled(seat, "small", "inductor")
in_one_graph(seat, "inductor")
print("well")
"""


@pytest.mark.soak
def test_a_rank_that_is_alone() -> None:
    sim.run(1, lambda: in_one_graph(Seat(0, 1, "sim", ""), "aot_eager"))


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
def test_the_default_compiler(size: int) -> None:
    command = [*SORDINO, "run", "--launcher", "local", "-np", str(size), "--", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * HANG_S)
    assert done.stdout.splitlines() == ["well"] * size, done.stderr
