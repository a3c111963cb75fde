"""The benchmark of launchers and transports between hosts: results from measurements, and short runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import transports
from results import ResultsOf
from sordino._core import build_info
from timings.transports import allreduce, start
from timings.transports.report import MOMENTS, place_of


def test_the_limit_is_what_a_link_carries() -> None:
    """Each of two hosts sends as many bytes as the tensor has; each of four sends half as many again."""
    assert allreduce.limit(956 * 125_000, 2, 1000) == pytest.approx(1.0)
    assert allreduce.limit(956 * 125_000, 4, 1000) == pytest.approx(1.5)
    assert allreduce.limit(1, 2, 0) is None and allreduce.limit(1, 0, 1000) is None


def test_places_are_told_in_words() -> None:
    assert place_of({"hosts": 0, "ranks_per_host": 2, "mbps": 0.0}) == "one machine, 2 ranks"
    assert place_of({"hosts": 2, "ranks_per_host": 1, "mbps": 1000.0}) == "2 hosts, 1 rank each, 1000 Mbps"
    assert place_of({"hosts": 2, "ranks_per_host": 2, "mbps": 0.0}).endswith(
        "2 ranks each, links as fast as the machine"
    )


def test_starting_counts_without_what_is_imported() -> None:
    def moments(*seconds: float) -> dict[str, Any]:
        return {name: {"median": at} for name, at in zip(MOMENTS, seconds)}

    found = {"local": moments(0.25, 9.0, 10.0, 10.5), "alone": moments(0.1, 1.6)}
    [target] = start.targets(found)
    assert target["value"] == pytest.approx(0.5) and target["met"]


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("launcher")
def test_starts_run(tmp_path: Path, results_of: ResultsOf) -> None:
    assert transports.main(["start", "--quick", "--ranks", "2", "--results", str(tmp_path)]) == 0
    found = results_of("transports_start")["contestants"]
    for name, moments in found.items():
        reached = [moments[moment]["median"] for moment in MOMENTS if moment in moments]
        assert reached == sorted(reached) and len(reached) == (4 if name == "alone" else 6)


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("emulated_hosts")
@pytest.mark.skipif(not build_info()["ucx"], reason="this build has no UCX")
def test_all_reduces_run_here_and_on_hosts(tmp_path: Path, results_of: ResultsOf) -> None:
    words = ["--quick", "--hosts", "0,2x1", "--sizes", "4KiB,1MiB", "--mbps", "1000", "--results", str(tmp_path)]
    assert transports.main(["allreduce", *words]) == 0
    found = results_of("transports_allreduce")
    assert [(row["hosts"], row["bytes"]) for row in found["rows"]] == [
        (hosts, size) for hosts in (0, 2) for size in (4 << 10, 1 << 20)
    ]
    assert found["wrong"] == []
    large = found["rows"][-1]
    assert all(one["least"] > 0.9 * large["limit"] for one in large["contestants"].values())


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("emulated_hosts")
@pytest.mark.skipif(not build_info()["ucx"], reason="this build has no UCX")
def test_losses_are_told_on_every_way(tmp_path: Path, results_of: ResultsOf) -> None:
    assert transports.main(["loss", "--quick", "--results", str(tmp_path)]) == 0
    found = results_of("transports_loss")["contestants"]
    assert {name: one["count"] for name, one in found.items()} == dict.fromkeys(
        ("local", "mpi", "hosts_ucx", "hosts_mpi"), 2
    )
