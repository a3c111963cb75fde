"""Processes that meet at a torch.distributed store, without a launcher of Sordino, join a running job."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import forked
import numpy as np
import pytest
from growing import Grown
from growing_worker import Plan
from launched import eventually
from pace import HANG_S
from pods import Pods, pods
from test_join import reference, require_joined

from sordino._core import build_info

UNTIL_TOLD = """
import pathlib, sys, time, torch
import sordino.torch as hvd
folder = pathlib.Path(sys.argv[1])
hvd.init(on_peer_lost="raise")
(folder / f"ready.{hvd.rank()}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
"""


def wait_until(condition: Callable[[], bool], job: Pods) -> None:
    assert eventually(condition, HANG_S), job.text()


def require_equal(grown: Grown, ranks: list[int], plan: Plan) -> None:
    """Check that these ranks have ended together, with the parameters that they must have."""
    require_joined(grown, ranks, plan)
    ends = grown.parameters("end")
    assert all(ends[rank] == ends[0] for rank in ranks)
    np.testing.assert_allclose(ends[0], reference(grown, 0), rtol=1e-12)


@pytest.mark.drill("a pod comes back")
@pytest.mark.parametrize("transport", ("local", "ucx"))
def test_a_pod_that_comes_back_joins(tmp_path: Path, transport: str) -> None:
    """It has the variables of the lost pod, and gets a new identity."""
    if transport == "ucx" and not build_info()["ucx"]:
        pytest.skip("this build has no UCX")
    plan = Plan(kill={"1": 3}, size=3)
    variables = {"SORDINO_RANKS_PER_NODE": "2"} if transport == "ucx" else {}
    with pods(tmp_path, 3, plan, SORDINO_TRANSPORT=transport, SORDINO_TOKEN="secret", **variables) as job:
        require_equal(job.run(again=1), [0, 2, 3], plan)


@pytest.mark.drill("processes join at a store")
def test_others_join_at_the_store(tmp_path: Path) -> None:
    plan = Plan(size=4)
    with pods(tmp_path, 2, plan) as job:
        wait_until(lambda: any(tmp_path.glob("before.*")), job)
        job.join("a")
        job.join("b")
        require_equal(job.run(), [0, 1, 2, 3], plan)


@pytest.mark.drill("a process is lost while one joins at a store")
@pytest.mark.parametrize(
    ("victim", "moment"), [("3", "invited"), ("3", "met"), ("2", "met"), ("0", "met"), ("0", "made"), ("2", "deaf")]
)
def test_a_process_is_lost_while_one_joins(tmp_path: Path, victim: str, moment: str) -> None:
    plan = Plan(kill={"1": 3}, size=3, strike={victim: moment}, meeting_s=2.0)
    with pods(tmp_path, 3, plan) as job:
        grown = job.run(again=2)
    require_joined(grown, sorted({0, 2, 3, 4} - {int(victim)}), plan)


@pytest.mark.drill("who may not join at a store")
def test_who_may_not_join(tmp_path: Path) -> None:
    """Processes with another secret or another model may not join. The job continues."""
    plan = Plan(size=3, width={"2": 5})
    with pods(tmp_path, 2, plan, SORDINO_TOKEN="secret") as job:
        wait_until(lambda: any(tmp_path.glob("before.*")), job)
        job.join("stranger", SORDINO_TOKEN="guessed")
        wait_until(lambda: bool(job.ended("stranger")), job)
        job.join("misfit")
        wait_until(lambda: bool(job.ended("misfit")), job)
        assert job.statuses == {"stranger": [1], "misfit": [1]}
        job.statuses.clear()
        job.join("good")
        grown = job.run()
    require_equal(grown, [0, 1, 3], plan)
    assert "sordino/start/job in the store is not signed with this process's SORDINO_TOKEN" in grown.output
    assert "process 2 was refused: the job has " in grown.output


@pytest.mark.drill("a process comes too late")
def test_who_comes_when_the_job_is_over_gets_an_error(tmp_path: Path) -> None:
    with pods(tmp_path, 2, Plan()) as job:
        assert job.run().ended.status == 0
        job.start(1)
        assert job.run().ended.status == 1
    assert "process 2 has asked to join a job that has ended" in job.text()


@pytest.mark.drill("a process comes to a job that does not grow")
def test_who_comes_to_a_job_that_does_not_grow_gets_an_error(tmp_path: Path) -> None:
    """The process ends with an error. It does not wait for ranks of the first meeting."""
    words = [*forked.python(), "-c", UNTIL_TOLD, str(tmp_path)]
    with pods(tmp_path, 2, words) as job:
        wait_until(lambda: len([*tmp_path.glob("ready.*")]) == 2, job)
        job.start(1)
        wait_until(lambda: "has begun there before, without this process" in job.text(), job)
        (tmp_path / "go").touch()
        job.run()
        assert job.statuses["0"] == [0] and sorted(job.statuses["1"]) == [0, 1]


@pytest.mark.drill("the first rank leaves")
def test_the_job_goes_on_when_its_first_rank_leaves(tmp_path: Path) -> None:
    plan = Plan(size=3, leave={"0": 3})
    with pods(tmp_path, 3, plan) as job:
        wait_until(lambda: bool(job.ended("0")), job)
        assert not job.is_over()
        job.join("a")
        grown = job.run()
        assert job.is_over()
    require_joined(grown, [1, 2, 3], plan)


@pytest.mark.drill("the store is lost")
def test_a_job_goes_on_without_its_store(tmp_path: Path) -> None:
    """The first rank logs that no process can join any more."""
    plan = Plan(size=3, steps=200, hold=300)
    with pods(tmp_path, 2, plan) as job:
        wait_until(lambda: (tmp_path / "log.0").exists(), job)
        job.store = None
        gc.collect()
        grown = job.run()
    assert grown.ended.status == 0, grown.output
    assert list(grown.parameters("end")) == [0, 1]
    assert "no process can join the job any more: the store at which the ranks meet does not answer" in grown.output
