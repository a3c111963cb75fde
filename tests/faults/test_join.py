"""Processes join a running job and take over its state. From then on, the job trains like any job of these ranks with
this state. No fault of a newcomer, or of a rank meanwhile, disturbs the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import forked
import numpy as np
import pytest
from growing import WORKER, Grown, Plan, clean_environment, run_job, run_words
from growing_worker import MOMENTUM, RATE, WIDTH, target
from launched import eventually
from pace import HANG_S
from ports import free_ports

from sordino._core import build_info
from sordino.cli.app import main
from sordino.launcher.processes import Ended
from sordino.record.reading import Reader


def reference(grown: Grown, of: int) -> np.ndarray:
    """Return the final parameters of SGD with averaged gradients, computed from the ranks of each step."""
    weights, momentum = np.ones(WIDTH), np.zeros(WIDTH)
    for step, line in enumerate(grown.log(of)):
        assert line["step"] == step
        gradients = [weights - target(rank, step).numpy() for rank in line["ranks"]]
        momentum = MOMENTUM * momentum + np.mean(gradients, axis=0)
        weights = weights - RATE * momentum
    return weights


def require_joined(grown: Grown, ranks: list[int], plan: Plan) -> None:
    """Check that these ranks have finished together, and that newcomers took part from the hold on."""
    assert grown.ended.status == 0, grown.output
    assert list(grown.parameters("end")) == ranks, grown.output
    for rank in ranks:
        last = grown.log(rank)[-1]
        assert last["step"] == plan.steps - 1 and sorted(last["ranks"]) == ranks, (rank, last)
        if rank > 3 or rank not in grown.parameters("before"):
            assert grown.log(rank)[0]["step"] == plan.hold


@pytest.mark.drill("a rank is replaced")
@pytest.mark.parametrize("transport", ("local", "ucx"))
def test_a_lost_rank_is_replaced(tmp_path: Path, transport: str) -> None:
    if transport == "ucx" and not build_info()["ucx"]:
        pytest.skip("this build has no UCX")
    plan = Plan(kill={"1": 3}, size=3)
    variables = {"SORDINO_RANKS_PER_NODE": "2"} if transport == "ucx" else {}
    record = tmp_path / "record"
    grown = run_job(tmp_path, 3, plan, 1, SORDINO_TRANSPORT=transport, SORDINO_RECORD=str(record), **variables)
    require_joined(grown, [0, 2, 3], plan)
    ranks = Reader(record).run.ranks
    (own,), (first,) = ranks[3].of("rank"), ranks[0].of("rank")
    assert [own[name] for name in ("host", "transport", "size")] == [first["host"], first["transport"], 3]
    assert [line["settings"] for line in ranks[3].of("optimizer")] == ["AllReduce()"]
    assert [line["step"] for line in ranks[3].of("step")] == list(range(plan.hold + 1, plan.steps + 1))
    assert not ranks[3].of("growth") and [line["joined"] for line in ranks[0].of("growth")] == [[3]]
    ends = grown.parameters("end")
    assert ends[0] == ends[2] == ends[3]
    np.testing.assert_allclose(ends[0], reference(grown, 0), rtol=1e-12)
    assert "rank 1 was ended by signal 9 (SIGKILL) and was replaced by process 3" in grown.ended.why


@pytest.mark.drill("a rank is replaced")
def test_a_replacement_serves_its_counters(tmp_path: Path) -> None:
    """The second of three ranks is lost. The third keeps its port, which would be the port of the replacement's
    rank."""
    pytest.importorskip("prometheus_client")
    plan = Plan(kill={"1": 3}, size=3)
    grown = run_job(tmp_path, 3, plan, 1, SORDINO_METRICS=f"127.0.0.1:{free_ports(4)}")
    require_joined(grown, [0, 2, 3], plan)


REPLACED_AGAIN_AND_AGAIN = """
import os, pathlib, signal, sys, time, torch
import sordino.torch as hvd
from sordino.runtime.context import current

hvd.init(on_peer_lost="continue")
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, joins=0)
files, maps = pathlib.Path("/proc/self/fd"), pathlib.Path("/proc/self/maps")
log = open(sys.argv[1], "a", buffering=1)


@hvd.elastic.run
def train(state):
    steps = 0
    while state.joins < 6:
        if hvd.size() == 2:
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            steps += 1
            if current().identity > 0 and steps == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if current().identity == 0 and steps == 1:
                state.joins += 1
                print(len(list(files.iterdir())), maps.read_text().count("memfd:sordino"), file=log)
        time.sleep(0.01)
        state.commit()


train(state)
"""


@pytest.mark.soak
def test_each_replacement_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """The numbers of open files and mappings of the rank that stays do not grow."""
    words = [*forked.python(), "-c", REPLACED_AGAIN_AND_AGAIN, str(tmp_path / "held")]
    grown = run_words(tmp_path, 2, words, 8)
    held = (tmp_path / "held").read_text().splitlines()
    assert len(held) == 6 and len(set(held[1:])) == 1, (held, grown.output)


@pytest.mark.drill("a rank is replaced, by algorithm")
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    (
        pytest.param("crossover", [], id="crossover"),
        pytest.param("crossover", ["group_size=2"], id="crossover-groups"),
        pytest.param("push-sum", [], id="push-sum"),
        pytest.param("push-sum", ["overlap=1"], id="push-sum-overlap"),
        pytest.param("local-sgd", ["interval=2"], id="local-sgd"),
        pytest.param("diloco", ["interval=2"], id="diloco"),
        pytest.param("diloco", ["interval=4", "overlap=2"], id="diloco-overlap"),
        pytest.param("noloco", ["interval=2"], id="noloco"),
        pytest.param("caps", [], id="caps"),
        pytest.param("elastic-averaging", [], id="elastic-averaging"),
        pytest.param("scheduled-pull", [], id="scheduled-pull"),
        pytest.param("adpsgd", [], id="adpsgd"),
    ),
)
def test_with_each_algorithm(tmp_path: Path, algorithm: str, settings: list[str]) -> None:
    """The mean of the models does not change, and all ranks continue from it."""
    plan = Plan(algorithm, settings, kill={"1": 3, "3": 3}, size=4)
    grown = run_job(tmp_path, 4, plan, 2)
    require_joined(grown, [0, 2, 4, 5], plan)
    before, after = grown.parameters("before"), grown.parameters("after")
    mean = np.mean([before[0], before[2]], axis=0)
    for rank in (0, 2, 4, 5):
        np.testing.assert_allclose(after[rank], mean, rtol=1e-12, err_msg=f"rank {rank}")


@pytest.mark.drill("a rank is replaced, by algorithm")
def test_a_newcomer_gets_the_state_of_its_group(tmp_path: Path) -> None:
    """Groups train separately from step 2 on, and the other rank of its group has been there from the start."""
    plan = Plan("local-sgd", ["interval=2", "group_size=2", "exchange=allreduce", "start=2"], kill={"1": 3}, size=4)
    grown = run_job(tmp_path, 4, plan, 1)
    require_joined(grown, [0, 2, 3, 4], plan)
    before, after = grown.parameters("before"), grown.parameters("after")
    mean = np.mean([before[0], before[2], before[3]], axis=0)
    for rank in (0, 2, 3, 4):
        np.testing.assert_allclose(after[rank], mean, rtol=1e-12, err_msg=f"rank {rank}")


@pytest.mark.drill("a rank is lost while a process joins")
@pytest.mark.parametrize("victim", (0, 2))
@pytest.mark.parametrize("moment", ("met", "adopted", "made"))
def test_a_rank_is_lost_while_a_process_joins(tmp_path: Path, victim: int, moment: str) -> None:
    """The first rank is lost, or another one. The remaining ranks recover, and admit the newcomers."""
    plan = Plan(kill={"1": 3}, size=3, strike={f"{victim}": moment})
    grown = run_job(tmp_path, 3, plan, 2)
    require_joined(grown, sorted({0, 2, 3, 4} - {victim}), plan)
    ends = list(grown.parameters("end").values())
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.drill("a newcomer is lost while it joins")
@pytest.mark.parametrize("moment", ("invited", "met", "adopted", "made"))
def test_a_newcomer_is_lost_while_it_joins(tmp_path: Path, moment: str) -> None:
    plan = Plan(kill={"1": 3}, size=3, strike={"3": moment})
    grown = run_job(tmp_path, 3, plan, 2)
    require_joined(grown, [0, 2, 4], plan)
    ends = grown.parameters("end")
    assert ends[0] == ends[2] == ends[4]
    np.testing.assert_allclose(ends[0], reference(grown, 0), rtol=1e-12)


@pytest.mark.drill("a newcomer comes too late")
def test_a_newcomer_comes_to_the_meeting_too_late(tmp_path: Path) -> None:
    """The ranks have given up the newcomer, and continue to train. It asks again, and joins."""
    plan = Plan(kill={"1": 3}, size=3, strike={"3": "stopped"}, meeting_s=1.0)
    grown = run_job(tmp_path, 3, plan, 1)
    require_joined(grown, [0, 2, 3], plan)
    np.testing.assert_allclose(grown.parameters("end")[0], reference(grown, 0), rtol=1e-12)


@pytest.mark.drill("a rank is lost before a newcomer has the state")
@pytest.mark.parametrize("algorithm", ("crossover", "push-sum", "diloco", "noloco"))
def test_a_rank_is_lost_before_a_newcomer_has_the_state(tmp_path: Path, algorithm: str) -> None:
    """The newcomer's own parameters, 103 at first, are in no mean."""
    settings = ["interval=2"] if algorithm in ("diloco", "noloco") else []
    plan = Plan(algorithm, settings, kill={"1": 3}, size=3, strike={"2": "made"})
    grown = run_job(tmp_path, 3, plan, 2)
    assert grown.ended.status == 0, grown.output
    assert all(np.abs(one).max() < 2 for one in grown.parameters("end").values()), grown.parameters("end")


@pytest.mark.drill("a newcomer that does not fit")
def test_a_newcomer_with_another_model_is_refused(tmp_path: Path) -> None:
    plan = Plan(kill={"1": 3}, size=3, width={"3": 5})
    grown = run_job(tmp_path, 3, plan, 2)
    require_joined(grown, [0, 2, 4], plan)
    assert (
        "process 3 was refused: the job has model.weight [1, 12], and the newcomer model.weight [1, 5]" in grown.output
    )
    assert "ConfigurationMismatch: this process cannot join the running job" in grown.output


@pytest.mark.drill("a newcomer that does not join")
def test_a_process_that_does_not_join_does_not_train_alone(tmp_path: Path) -> None:
    plan = Plan(kill={"1": 3}, size=3, outside=[3])
    grown = run_job(tmp_path, 3, plan, 2)
    require_joined(grown, [0, 2, 4], plan)
    assert "has yet to join the running job, and would train alone" in grown.output


def test_the_job_ends_before_a_process_can_join(tmp_path: Path) -> None:
    """Both the process and the job end with status 0."""
    plan = Plan(kill={"1": 11}, hold=99)
    grown = run_job(tmp_path, 3, plan, 1)
    assert grown.ended.status == 0, grown.output
    assert list(grown.parameters("end")) in ([0, 2], [0, 2, 3]), grown.output
    if 3 not in grown.parameters("end"):
        assert "the job has ended before process 3 could join it" in grown.output


def test_a_newcomer_is_lost_later(tmp_path: Path) -> None:
    """The others continue without it, as without any other rank."""
    plan = Plan(kill={"1": 3, "3": 8}, size=3)
    grown = run_job(tmp_path, 3, plan, 1)
    assert grown.ended.status == 0, grown.output
    assert list(grown.parameters("end")) == [0, 2]
    np.testing.assert_allclose(grown.parameters("end")[0], reference(grown, 0), rtol=1e-12)


@pytest.mark.drill("samples are divided anew when ranks join")
@pytest.mark.parametrize(("ranks", "hold"), ((3, 6), (3, 30), (1, 30)))
def test_every_sample_is_visited(tmp_path: Path, ranks: int, hold: int) -> None:
    """This holds for the epoch in which others join (and, of three ranks, one is lost), and for the next one."""
    samples, kill = 100, {"1": hold - 2} if ranks > 1 else {}
    plan = Plan(kill=kill, size=3, hold=hold, samples=samples)
    if ranks == 1:
        job = command(tmp_path, "output", "run", "-np", "1", "--on-peer-lost", "continue", plan=plan)
        assert eventually(lambda: (tmp_path / "pid.0").exists(), HANG_S)
        pid = (tmp_path / "pid.0").read_text()
        others = [command(tmp_path, f"output of {k}", "join", pid, plan=plan) for k in range(2)]
        assert [one.wait(HANG_S) for one in (job, *others)] == [0, 0, 0]
    else:
        grown = run_job(tmp_path, ranks, plan, 1)
        assert grown.ended.status == 0 and list(grown.parameters("end")) == [0, 2, 3], grown.output
    for epoch in range(2):
        visits = [line.split() for path in tmp_path.glob("visited.*") for line in path.read_text().splitlines()]
        mine = [int(sample) for at, sample in visits if int(at) == epoch]
        assert set(mine) == set(range(samples))
        assert len(mine) <= samples + 3 * 2  # padding of three divisions


@pytest.mark.drill("a rank leaves in good order")
@pytest.mark.parametrize("algorithm", ("crossover", "allreduce", "push-sum", "diloco"))
@pytest.mark.parametrize("leavers", ((1,), (0,), (0, 2)))
def test_ranks_leave(tmp_path: Path, algorithm: str, leavers: Sequence[int]) -> None:
    """The models of ranks that leave stay in the mean of all models."""
    stay = [rank for rank in range(3) if rank not in leavers]
    plan = Plan(algorithm, size=len(stay), hold=99, leave={f"{rank}": 4 for rank in leavers})
    grown = run_job(tmp_path, 3, plan, 0)
    assert grown.ended.status == 0 and not grown.ended.why, grown.output
    assert list(grown.parameters("end")) == stay
    mean = np.mean(list(grown.parameters("before").values()), axis=0)
    for rank in stay:
        np.testing.assert_allclose(grown.parameters("after")[rank], mean, rtol=1e-12)
        assert grown.log(rank)[-1] == grown.log(rank)[-1] | {"step": plan.steps - 1, "ranks": stay}
    if algorithm == "allreduce":
        np.testing.assert_allclose(grown.parameters("end")[stay[0]], reference(grown, stay[0]), rtol=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "settings", "compression"),
    [
        ("allreduce", [], "sign"),
        ("diloco", ["interval=1", "compression=sign"], "none"),
        ("local-sgd", ["interval=1", "compression=sign"], "none"),
    ],
)
def test_ranks_keep_what_they_owe_when_another_leaves(
    tmp_path: Path, algorithm: str, settings: list[str], compression: str
) -> None:
    """The numbers of the remaining ranks change, as the first rank leaves."""
    plan = Plan(algorithm, settings, size=2, hold=99, leave={"0": 4}, compression=compression)
    grown = run_job(tmp_path, 3, plan, 0)
    assert grown.ended.status == 0 and list(grown.parameters("end")) == [1, 2], grown.output
    assert "never sent" not in grown.output
    for rank in (1, 2):
        before, after = (float((tmp_path / f"owed-{when}.{rank}").read_text()) for when in ("before", "after"))
        assert after > 0.1 * before > 0, (before, after)


@pytest.mark.parametrize("leaver", (0, 1))
def test_a_rank_leaves_a_job_with_process_sets(tmp_path: Path, leaver: int) -> None:
    """The rank counts as lost, so the sets continue with their other members."""
    plan = Plan(hold=99, leave={f"{leaver}": 4}, members=[0, 2])
    grown = run_job(tmp_path, 3, plan, 0)
    stay = [rank for rank in range(3) if rank != leaver]
    assert grown.ended.status == 0 and list(grown.parameters("end")) == stay, grown.output
    assert grown.log(2)[-1]["ranks"] == stay


def test_a_process_joins_after_the_process_sets_have_been_removed(tmp_path: Path) -> None:
    """The newcomer then adds sets with the others, which have had some before."""
    plan = Plan(kill={"1": 3}, size=3, members=[0, 2], removes=True)
    grown = run_job(tmp_path, 3, plan, 1, SORDINO_TIMEOUT_S="20")
    require_joined(grown, [0, 2, 3], plan)


def test_all_want_to_leave(tmp_path: Path) -> None:
    """All ranks stay, as otherwise nothing of the job would remain."""
    plan = Plan(steps=120, hold=999, leave={"0": 3, "1": 3})  # more commits than resets that are allowed
    grown = run_job(tmp_path, 2, plan, 0)
    assert grown.ended.status == 0, grown.output
    assert list(grown.parameters("end")) == [0, 1]
    np.testing.assert_allclose(grown.parameters("end")[0], reference(grown, 0), rtol=1e-12)


def test_the_last_rank_is_lost_after_another_has_left(tmp_path: Path) -> None:
    """The job has failed, although one of its processes ended with status 0."""
    plan = Plan(hold=99, leave={"0": 3}, kill={"1": 6})
    grown = run_job(tmp_path, 2, plan, 0)
    assert grown.ended.status == 137 and "rank 1 was ended by signal 9 (SIGKILL)" in grown.ended.why, grown.ended


def test_a_newcomer_without_a_state_does_not_train(tmp_path: Path) -> None:
    """The last rank with the state is lost after a newcomer has joined, and before it has received the state."""
    plan = Plan(kill={"1": 3}, size=2, strike={"0": "made"})
    grown = run_job(tmp_path, 2, plan, 1)
    assert grown.ended.status == 137 and not grown.log(2), (grown.ended, grown.log(2))
    assert "all ranks that had the state of the job were lost before this process" in grown.output


def command(folder: Path, output: str, *words: str, plan: Plan) -> subprocess.Popen[bytes]:
    """Start a command of `sordino` with the worker as its program."""
    program = [*forked.python(), str(WORKER), str(folder), json.dumps(asdict(plan))]
    with open(folder / output, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "sordino.cli", *words, "--", *program],
            stdout=file,
            stderr=file,
            env=clean_environment(),
        )


def test_join_from_another_terminal(tmp_path: Path) -> None:
    plan = Plan(size=3)
    job = command(tmp_path, "output", "run", "-np", "2", "--on-peer-lost", "continue", plan=plan)
    pid = tmp_path / "pid.1"
    assert eventually(lambda: pid.exists() and pid.read_text() != "", HANG_S)
    joined = command(tmp_path, "output of 2", "join", pid.read_text(), plan=plan)
    assert joined.wait(HANG_S) == 0, (tmp_path / "output of 2").read_text()
    status = job.wait(HANG_S)
    grown = Grown(tmp_path, Ended(status))
    require_joined(grown, [0, 1, 2], plan)
    ends = grown.parameters("end")
    assert ends[0] == ends[1] == ends[2]
    np.testing.assert_allclose(ends[0], reference(grown, 0), rtol=1e-12)


REPLACING = ("run", "-np", "2", "--respawn")


@pytest.mark.parametrize(
    ("words", "message"),
    (
        ((*REPLACING, "-1", "--", "true"), "--respawn -1: must be 0 or more"),
        ((*REPLACING, "1", "--on-peer-lost", "raise", "--", "true"), "needs --on-peer-lost continue"),
        ((*REPLACING, "1", "--launcher", "mpi", "--", "true"), "needs the local launcher"),
        (("join",), "no command; write that of the job after `--`"),
        (("join", "1", "--", "true"), "process 1 is not a rank of `sordino run`"),
    ),
)
def test_wrong_commands(words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
