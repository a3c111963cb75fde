"""Links between emulated hosts are cut or slow. The majority continues, other hosts stop, and never do two parts
continue. A short cut or a slow link costs only time."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import forked
import pytest
from pace import HANG_S, bound
from surviving import GOES_ON_WITHIN_S, PLAN_OF_HOSTS, WORKER, Note, hosts

from cluster import Cluster

SLOW_MBPS, WIDTH = 10, 256


@pytest.mark.drill("one host cut off")
@pytest.mark.parametrize("algorithm", ["allreduce", "crossover"])
def test_three_go_on_without_one(way: str, tmp_path: Path, note_time: Note, algorithm: str) -> None:
    with hosts(tmp_path, {**PLAN_OF_HOSTS, "algorithm": algorithm}, way) as running:
        running.wait_for("step.0", "step.1", "step.2", "step.3")
        running.cluster.cut("node3")
        cut = time.time()
        for resize in running.resizes(lost=3):
            note_time(f"one of four hosts cut off, {running.silence_s:g} s of silence", resize["at"] - cut)
            assert resize["at"] - cut < bound(GOES_ON_WITHIN_S, running.silence_s)
        running.wait_for("report.3")
        alone = running.read("report.3")
        assert alone["ended"] == "NoQuorum" and alone["finite"], alone
        running.finish_without(3)


@pytest.mark.drill("two halves")
def test_two_halves_both_stop(way: str, tmp_path: Path, note_time: Note) -> None:
    with hosts(tmp_path, PLAN_OF_HOSTS, way) as running:
        running.wait_for("step.0", "step.1", "step.2", "step.3")
        running.cluster.part(["node2", "node3"])
        cut = time.time()
        running.wait_for("report.0", "report.1", "report.2", "report.3")
        for rank in range(4):
            report = running.read(f"report.{rank}")
            assert report["ended"] == "NoQuorum" and report["finite"] and not report["resized"], report
            note_time(f"halves of four hosts, {running.silence_s:g} s of silence", report["at"] - cut)
            # Each rank gets signs of life from only two others. It asks about the rest when one of the two is silent.
            assert report["at"] - cut < bound(GOES_ON_WITHIN_S, 2 * running.silence_s)


@pytest.mark.drill("a short cut")
def test_a_short_cut_costs_nobody(way: str, tmp_path: Path) -> None:
    """A cut of three seconds is shorter than the silence, whose default is ten seconds."""
    with hosts(tmp_path, PLAN_OF_HOSTS, way, silence_s=10) as running:
        running.wait_for("step.0", "step.1", "step.2", "step.3")
        running.cluster.cut("node3")
        (tmp_path / "go").touch()  # a step that was waiting for it begins while the host is cut off
        time.sleep(3)
        running.cluster.cut("node3", False)
        running.wait_for("report.0", "report.1", "report.2", "report.3")
        reports = [running.read(f"report.{rank}") for rank in range(4)]
        for report in reports:
            assert report["ended"] == "well" and report["members"] == [0, 1, 2, 3] and not report["resized"], report
        assert len({report["sha256"] for report in reports}) == 1
        assert max(max(report["seconds"]) for report in reports) > 1, "no rank noticed the cut; make it longer"


@pytest.mark.drill("a slow link")
def test_a_slow_link(emulated_hosts: None, tmp_path: Path) -> None:
    """All-reduce is as slow as the slowest link. Algorithms that communicate less, or that do not wait, are faster."""
    medians = {}
    with Cluster(hosts=3, mbps=[1000, 1000, SLOW_MBPS]) as cluster:
        for algorithm in ("allreduce", "local-sgd", "scheduled-pull"):
            folder = tmp_path / algorithm
            folder.mkdir()
            steps = 5 if algorithm == "allreduce" else 18
            plan = json.dumps({"algorithm": algorithm, "width": WIDTH, "pause_s": 0.02, "steps": steps})
            command = [*forked.python(), str(WORKER), str(folder), plan]
            done = cluster.run(
                3,
                command,
                env={"SORDINO_TIMEOUT_S": "60", **forked.environment()},
                timeout=HANG_S,
                options=["--with-ft", "ulfm"],
            )
            assert done.returncode == 0, done.stdout + done.stderr
            reports = [json.loads((folder / f"report.{rank}").read_text()) for rank in range(3)]
            for report in reports:
                assert report["members"] == [0, 1, 2] and report["finite"] and not report["resized"], report
                assert report["loss"] < report["first_loss"], report
            medians[algorithm] = max(statistics.median(report["seconds"][1:]) for report in reports)
    transfer_s = 8 * 8 * WIDTH**2 / (SLOW_MBPS * 1e6)  # of the largest layer, in float64
    assert medians["allreduce"] > transfer_s
    for algorithm in ("local-sgd", "scheduled-pull"):
        assert medians[algorithm] < max(transfer_s, bound(0.02)), medians
