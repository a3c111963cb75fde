"""The same program gives the same bits with every launcher and every transport."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import forked
import pytest
from checks.commands import SORDINO
from pace import HANG_S

from cluster import Cluster
from sordino._core import build_info

WORKER = Path(__file__).with_name("same_bits_worker.py")
TIMEOUT_S = 3 * HANG_S


def of_this_machine(out: Path, per_node: int, *words: str, **variables: str) -> dict[str, Any]:
    """Return the results of four ranks on this machine, `per_node` on each node (0: all on one)."""
    command = [*SORDINO, "run", *words, "-np", "4", "--", *forked.python(), str(WORKER), str(out)]
    environment = {**os.environ, "SORDINO_RANKS_PER_NODE": str(per_node), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def of_hosts(out: Path, cluster: Cluster, per_host: list[int], by_torchrun: bool) -> dict[str, Any]:
    """Return the results of four ranks on emulated hosts, over UCX or MPI."""
    start = cluster.torchrun if by_torchrun else cluster.run
    command = [*forked.python(), str(WORKER), str(out)]
    done = start(4, command, env=forked.environment(), timeout=TIMEOUT_S, per_host=per_host)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def models(found: dict[str, Any]) -> dict[str, list[str]]:
    return {name: hashes for name, hashes in found.items() if name not in ("transport", "nodes")}


@pytest.mark.drill("the same bits")
@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("per_node", [2, 3, 0])
def test_on_one_machine(tmp_path: Path, per_node: int) -> None:
    local = of_this_machine(tmp_path / "local", per_node)
    by_mpirun = of_this_machine(tmp_path / "mpi", per_node, "--launcher", "mpi")
    assert models(local) == models(by_mpirun)
    assert (local["transport"], by_mpirun["transport"]) == ("local", "mpi + shared memory")
    assert local["nodes"] == by_mpirun["nodes"] == (2 if per_node else 1)
    assert (
        len(set(local["allreduce"])) == 1 and len(set(local["crossover"])) > 1
    )  # all-reduce gives all ranks one model, and crossover does not
    if build_info()["ucx"]:
        assert models(of_this_machine(tmp_path / "ucx", per_node, SORDINO_TRANSPORT="ucx")) == models(local)


@pytest.mark.drill("the same bits")
@pytest.mark.usefixtures("launcher", "emulated_hosts")
@pytest.mark.parametrize("per_host", [[3, 1], [2, 2]])
def test_on_two_hosts(tmp_path: Path, per_host: list[int]) -> None:
    if not build_info()["ucx"]:
        pytest.skip("this build has no UCX")
    with Cluster(hosts=2) as cluster:
        by_torchrun = of_hosts(tmp_path / "torchrun", cluster, per_host, by_torchrun=True)
        by_mpirun = of_hosts(tmp_path / "mpi", cluster, per_host, by_torchrun=False)
    assert models(by_torchrun) == models(by_mpirun)
    assert (by_torchrun["transport"], by_mpirun["transport"]) == ("ucx + shared memory", "mpi + shared memory")
    assert by_torchrun["nodes"] == 2
