"""Plans: costs against the paper's equations, the rule for the number of local models, and the command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from results import ResultsOf
from sordino import plan, sim
from sordino.algorithms import Algorithm, AllReduce, Crossover, DiLoCo, LocalSGD, PushSum
from sordino.cli.app import main
from sordino.cli.plan import parse_count
from sordino.codecs import Int8
from sordino.errors import UsageError
from sordino.plan import evidence, tasks
from sordino.plan.cluster import Cluster
from sordino.plan.command import even_shapes
from sordino.plan.costs import Load
from sordino.plan.predictions import as_rows
from sordino.plan.report import _workers as local_models
from sordino.plan.report import markdown, reliability
from sordino.record.reading import Reader
from sordino.report import machines

ALPHA, BETA = 1e-4, 1e-8
APART = plan.Rates(None, plan.Line(ALPHA, BETA), 0.0, hop=ALPHA)
M = 40e6  # bytes of the model
NAMES, SIZES = ["a", "b"], [10_000_000, 30_000_000]


def seconds(algorithm: plan.Cost) -> float:
    return algorithm.communication(APART)


def rounds_of_ring(size: int) -> int:
    """Return the rounds of an all-reduce. Two members need no ring: they swap their vectors in one round."""
    return 1 if size == 2 else 2 * (size - 1)


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_allreduce_costs_what_a_ring_does(size: int) -> None:
    cost = plan.cost_of(AllReduce(bucket_bytes=1 << 40), range(size), NAMES, SIZES)
    assert seconds(cost) == pytest.approx(rounds_of_ring(size) * ALPHA + 2 * (size - 1) / size * M * BETA)
    assert cost.sent() == pytest.approx([2 * (size - 1) / size * M] * size)


def test_a_small_allreduce_of_three_hosts_goes_to_the_third_and_back() -> None:
    """Two hosts swap their vectors. The third sends its vector to one of them before, and gets the result back."""
    load = Load([0, 1, 2])
    load.all_reduce([[0, 1, 2]], 100)
    assert load.sent == [200, 100, 100] and load.link == 200


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("members", [2, 3, 4])
def test_local_sgd_costs_equations_6_to_8(groups: int, members: int) -> None:
    """The latency differs from the equations: all messages of an exchange leave at once, and the all-reduce is a
    ring."""
    size, interval = groups * members, 4
    inside = M * (members - 1) / members * BETA + ALPHA
    across = 2 * M / members * (groups - 1) / groups * BETA + rounds_of_ring(groups) * ALPHA
    algorithm = LocalSGD(interval, members, bucket_bytes=1 << 40)
    cost = plan.cost_of(algorithm, range(size), NAMES, SIZES)
    assert seconds(cost) == pytest.approx(2 * inside + across / interval)


def test_a_node_hides_what_stays_in_it() -> None:
    nodes = [0, 0, 1, 1]
    cost = plan.cost_of(LocalSGD(4, 2), nodes, NAMES, SIZES)
    # Both ranks of a node average their half with a peer: 2 (P - 1) / P M / K each, every 4 steps.
    assert cost.sent() == pytest.approx([M / 2 / 4] * 4)
    assert [phase.load.link for phase in cost.phases] == [0, M, 0]
    whole = plan.cost_of(LocalSGD(4, 2, "allreduce"), nodes, NAMES, SIZES)
    assert whole.sent() == pytest.approx([M / 4] * 4)


def test_memory_costs_what_is_read_and_written() -> None:
    rates = plan.Rates(plan.Line(0.0, 1e-10), None, 0.0)

    def memory(algorithm: plan.Cost) -> float:
        return algorithm.communication(rates) / (M * 1e-10)

    assert memory(plan.cost_of(AllReduce(), [0] * 4, NAMES, SIZES)) == pytest.approx(2)
    # Four averages of two: all vectors are read once and once more from caches, and all are written.
    assert memory(plan.cost_of(Crossover(), [0] * 4, NAMES, SIZES)) == pytest.approx(2.25)
    # Both averages are the same.
    assert memory(plan.cost_of(Crossover(), [0] * 2, NAMES, SIZES)) == pytest.approx(2)


def test_exchanges_in_memory_have_the_latency_of_memory() -> None:
    """So do encoded exchanges, although each rank has a message for each of its peers."""
    rates = plan.Rates(plan.Line(ALPHA, 0.0), None, 0.0)
    for algorithm in (Crossover(), Crossover(compression=Int8())):
        assert plan.cost_of(algorithm, [0] * 4, NAMES, SIZES).communication(rates) == pytest.approx(ALPHA)
        assert plan.cost_of(algorithm, range(4), NAMES, SIZES).communication(rates) == 0


def test_software_costs_by_operation_and_tensor() -> None:
    rates = plan.Rates(None, None, 1.0, handling=10.0)
    assert plan.cost_of(AllReduce(), range(2), NAMES, SIZES).communication(rates) == 2 * 1.0 + 2 * 10.0
    assert plan.cost_of(LocalSGD(1, 1), range(2), NAMES, SIZES).communication(rates) == 1.0
    assert plan.cost_of(LocalSGD(4, 2), range(4), NAMES, SIZES).communication(rates) == 2 * 10.0 + 1.0 / 4
    assert plan.cost_of(PushSum(), range(4), NAMES, SIZES).communication(rates) == 0


def test_backward_hides_gradients_but_for_the_last_segment() -> None:
    cost = plan.cost_of(AllReduce(bucket_bytes=10_000_000), range(4), NAMES, SIZES)
    whole = seconds(cost)
    assert cost.exposed(APART, 0.0) == pytest.approx(whole)
    assert cost.exposed(APART, 0.15) == pytest.approx(whole - 0.1)  # backward takes two thirds of the step
    assert cost.exposed(APART, 100.0) == pytest.approx(whole / 4)
    gossip = plan.cost_of(PushSum(), range(4), NAMES, SIZES)
    assert gossip.exposed(APART, 100.0) == gossip.communication(APART)
    assert plan.cost_of(PushSum(overlap=1), range(4), NAMES, SIZES).exposed(APART, 100.0) == 0
    late = plan.cost_of(AllReduce(double_buffering=True), range(4), NAMES, SIZES)
    assert late.exposed(APART, 0.1) == pytest.approx(late.communication(APART) - 0.1)
    assert late.exposed(APART, 100.0) == 0
    outer = plan.cost_of(DiLoCo(interval=8, overlap=3), range(4), NAMES, SIZES)  # three steps hide it
    assert outer.exposed(APART, 0.1 / 3) == pytest.approx(outer.communication(APART) - 0.1 / 8)


def test_a_line_goes_through_its_points() -> None:
    line = plan.fit([(x, 3e-5 + 2e-9 * x) for x in (4e3, 6e4, 1e6, 2e7)])
    assert line == pytest.approx((3e-5, 2e-9), rel=1e-6)
    # A link that passes 16 KiB without delay.
    steep = plan.fit([(4096, 1.8e-5), (5e6, 0.0848), (1e7, 0.1689)])
    assert steep.alpha == 0 and steep.beta == pytest.approx(1.69e-8, rel=0.01)
    flat = plan.fit([(1e3, 5e-4), (1e6, 4e-4)])
    assert flat.beta == 0
    assert 4e-4 <= flat.alpha <= 5e-4
    with pytest.raises(ValueError, match="two points"):
        plan.fit([(1.0, 1.0)])


@pytest.mark.parametrize(
    ("distances", "chosen", "said"),
    [
        ({2: 0.85, 4: 1.95, 8: 3.2, 16: 4.0}, 4, "from P=4 to P=8 the distance D grew 1.64 times, not about 2"),
        ({2: 0.025, 4: 0.055, 8: 0.1, 16: 0.08}, 8, "grew 0.80 times"),  # Figure 8
        ({2: 1.0, 4: 2.0}, 4, "the largest number tried"),
        ({2: 1.0, 3: 1.4, 9: 4.0}, 9, "the largest number"),
        ({2: 1.0, 4: math.inf}, 2, "P=4 local models diverged"),
        ({2: math.inf}, 1, "P=2 local models diverged"),
        ({2: 0.0, 4: 0.0}, 2, "grew 0.00 times"),
    ],
)
def test_the_rule_names_the_last_proportional_number(distances: dict[int, float], chosen: int, said: str) -> None:
    """The first case is Figure 4 of the paper."""
    found, reason = plan.choose(distances, 0.85)
    assert found == chosen
    assert said in reason


def test_impossible_trials_are_refused() -> None:
    task = tasks.images("digits", None)
    for arguments, said in (
        ({"workers": (4, 2)}, "must be increasing"),
        ({"workers": ()}, "must be increasing"),
        ({"workers": (1, 2)}, "from 2 on"),
        ({"interval": 0}, "interval=0"),
        ({"averagings": 1}, "averagings=1"),
        ({"proportion": 0.0}, "proportion"),
        ({"rule": "cubic"}, "rule"),
    ):
        with pytest.raises(UsageError, match=said):
            plan.find_workers(task, **arguments)  # type: ignore[arg-type]


def predictions(compute: float, size: int = 4) -> list[plan.Prediction]:
    job = plan.Job([("a", (1000, 1000)), ("b", (500,))], compute, samples=1000, batch=10)
    return plan.predict(job, range(size), APART, interval=4)


def test_predictions_are_of_steps_and_epochs() -> None:
    found = predictions(0.05)
    assert [one.step for one in found] == sorted(one.step for one in found)
    allreduce = next(one for one in found if one.name == "AllReduce()")
    assert allreduce.step == pytest.approx(0.05 + allreduce.exposed)
    assert allreduce.epoch == pytest.approx(25 * allreduce.step)
    assert "LocalSGD(interval=4, group_size=2)" in {one.name for one in found}
    assert "LocalSGD(interval=4, group_size=2, exchange='allreduce')" in {one.name for one in found}


def test_encoding_takes_time_also_on_nodes_of_one_rank() -> None:
    cluster = Cluster(4, 1, 10.0, 0.0)
    cost = plan.cost_of(LocalSGD(1, compression="int4"), cluster.places, NAMES, [int(size) for size in SIZES])
    [phase] = cost.phases
    # all values encoded, the shards of all ranks decoded, all means decoded, and what local SGD copies besides
    copied = 3 * 2 * M / 0.5 + 10 * M
    link = phase.load.link * 8e-10
    assert phase.load.seconds(cluster.rates) == pytest.approx(link + copied * 1e-10, rel=1e-2)


def test_a_recommendation_has_its_reason() -> None:
    found = predictions(0.05)
    free = plan.recommend(found, 4, None)
    assert free.startswith("LocalSGD(interval=4, group_size=1, compression=Int4(block=128)): a step takes")
    assert "4 local models was not tested here. In a training of a GPT" in free
    assert "the loss of LocalSGD(interval=16, group_size=1, compression=Int4(block=128)) was" in free
    # 415 ms without a codec, 402 ms with one: not 5% faster
    assert plan.recommend(predictions(0.4), 4, None).startswith("LocalSGD(interval=4, group_size=1): a step takes")
    two = plan.Workers({2: 1.0, 4: 1.1}, 2, "")
    assert plan.recommend(found, 4, two).startswith("LocalSGD(interval=4, group_size=2): ")
    one = plan.Workers({2: math.inf}, 1, "")
    assert plan.recommend(found, 4, one).startswith("AllReduce(): no algorithm that qualifies")
    assert plan.recommend(predictions(10.0), 4, None).startswith("AllReduce(): no algorithm")
    slow = plan.recommend(predictions(5000.0), 4, None)
    assert "e+0" not in slow


def test_the_nearest_training_with_the_same_algorithm_is_cited() -> None:
    found = [
        evidence.Loss("LocalSGD(interval=16, group_size=1)", 1.0, 0.1),
        evidence.Loss("LocalSGD(interval=64, group_size=1)", 2.0, 0.1),
        evidence.Loss("LocalSGD(interval=16, group_size=2)", 3.0, 0.1),
        evidence.Loss("LocalSGD(interval=16, group_size=1, compression=Int4(block=128))", 4.0, 0.1),
        evidence.Loss("PushSum()", 5.0, 0.1),
    ]

    def cited(algorithm: Algorithm) -> float | None:
        one = evidence.nearest(algorithm, found)
        return None if one is None else one.percent

    assert cited(LocalSGD(8)) == cited(LocalSGD(31)) == 1.0
    assert cited(LocalSGD(33)) == 2.0
    assert cited(LocalSGD(64, group_size=4)) == 3.0
    assert cited(LocalSGD(8, compression="int4")) == 4.0
    assert cited(LocalSGD(8, compression="int8")) is None
    assert cited(PushSum()) == 5.0
    assert cited(PushSum(overlap=1)) is None
    assert evidence.sentence(PushSum(overlap=3)).startswith("Its loss is not known: ")


def test_a_measurement_counts_more_than_a_prediction() -> None:
    found = predictions(0.05)
    for one in found:
        one.measured = one.communication * (0.1 if one.name == "PushSum()" else 10.0)
    assert plan.recommend(found, 4, None).startswith("PushSum(): ")
    assert found[0].error == pytest.approx(-0.9)


def test_what_was_to_be_hidden_is_exposed_where_it_takes_longer_than_computing() -> None:
    late = next(one for one in predictions(1.0) if one.name == "AllReduce(double_buffering=True)")
    assert late.step == pytest.approx(1.0)
    late.measured = 1.5
    assert late.step == pytest.approx(1.5)
    assert late.epoch == pytest.approx(25 * 1.5)


def test_a_plan_says_how_far_its_predictions_were_off() -> None:
    found = predictions(0.05)
    assert "No algorithm was run" in reliability(as_rows(found))
    for one in found:
        one.measured = one.communication * (4.0 if one.name == "PushSum()" else 0.8)
    assert "of the predictions is 25%; the largest is -75%, for PushSum()" in reliability(as_rows(found))
    rows = as_rows(found)
    rows[-1]["error"] = -1.0  # predicted as nothing: infinitely wrong, which a report must survive
    assert f"the largest is -100%, for {rows[-1]['name']}." in reliability(rows)


def test_local_models_that_do_not_differ_have_no_growth() -> None:
    found = {"distances": {"2": 0.0, "4": 0.0}, "chosen": 4, "task": "t.py:task", "reason": "it is best"}
    text = "\n".join(local_models(found))
    assert "| 4 " in text and "times" in text and "nan" not in text


def test_sizes_are_read() -> None:
    assert [parse_count(text) for text in ("25.6M", "350k", "7", "1.3B", "2 m")] == [
        25_600_000, 350_000, 7, 1_300_000_000, 2_000_000
    ]  # fmt: skip
    for text in ("", "0", "-3", "many", "1.2.3", "5T"):
        with pytest.raises(UsageError, match="--parameters"):
            parse_count(text)
    for count in (1, 15, 16, 1003):
        assert sum(math.prod(shape) for _, shape in even_shapes(count)) == count


def test_tasks_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport torch\nimport beside\n"
        "from sordino.plan import Task\n@dataclass\nclass Settings:\n    lr: float = 0.1\n"
        "def task():\n    return Task(lambda: torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1),\n"
        "                lambda model, worker, step: model(torch.ones(1, 2)).square().sum())\n"
        "def other():\n    return 3\n"
    )
    assert isinstance(tasks.from_file(f"{file}:task").model(), torch.nn.Linear)
    for text, said in (
        (f"{file}:none", "no function 'none'"),
        (f"{file}:other", "returned a int"),
        ("task", "FILE.py:FUNCTION"),
        (f"{tmp_path}/no.py:task", "no file"),
    ):
        with pytest.raises(UsageError, match=said):
            tasks.from_file(text)


def test_a_budget_ends_the_trial() -> None:
    task = tasks.images("digits", None)
    found = plan.find_workers(task, (2, 4, 8), interval=1, averagings=4, budget=1e-9)
    assert sorted(found.distances) == [2]
    assert "the largest number tried" in found.reason


def test_the_same_task_gives_the_same_start() -> None:
    state = torch.random.get_rng_state()
    task = tasks.images("digits", None)
    one, other = (sim.run(1, task.model)[0] for _ in range(2))
    for mine, theirs in zip(one.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)
    assert torch.equal(state, torch.random.get_rng_state())


# --- The command ------------------------------------------------------------------------------------------------------


def run_plan(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sordino.cli", "plan", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=dict(os.environ))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--parameters", "lots"), "--parameters lots: expected a number"),
        (("--samples", "0"), "--samples 0"),
        (("--budget", "0"), "--budget 0"),
        (("--compute-ms", "nan"), "--compute-ms nan"),
        (("--hosts", "a:2"), "--hosts needs -np"),
        (("--nodes", "4x2"), "give the rate of a node's link, as in --gbps 10"),
        (("--nodes", "4"), "--nodes 4: expected NODESxRANKS"),
        (("--nodes", "1x1"), "a single rank does not communicate"),
        (("--nodes", "4x2", "--gbps", "0"), "--gbps 0: must be above 0"),
        (("--nodes", "4x2", "--gbps", "10", "-np", "2"), "cannot be combined with -np"),
        (("--gbps", "10"), "it needs --nodes"),
    ],
)
def test_nonsense_is_refused(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_single_rank_is_told_to_start_more() -> None:
    done = run_plan()
    assert done.returncode == 2, done.stderr
    assert "start more, as in: sordino plan -np 4" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("launcher")
def test_every_rank_refuses_but_one_speaks(tmp_path: Path) -> None:
    done = run_plan("-np", "2", "--task", f"{tmp_path}/none.py:task", "--record", str(tmp_path / "record"))
    assert done.returncode == 2
    assert done.stderr.count("no file") == 1
    assert not list(tmp_path.rglob("*.jsonl"))  # the folder can be used again
    assert "Traceback" not in done.stderr


def test_a_cluster_that_is_not_here_is_planned_for(tmp_path: Path) -> None:
    words = ["--nodes", "4x2", "--gbps", "10", "--latency-us", "20", "--record", str(tmp_path / "record")]
    done = run_plan(*words, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["assumed"] == "4 nodes of 2 ranks, links of 10 Gbit/s and 20 µs per message"
    assert found["rates"]["across"] == {"alpha": pytest.approx(2e-5), "beta": pytest.approx(8e-10)}
    assert found["ranks"] == 8 and found["nodes"] == 4 and all(row["measured"] is None for row in found["rows"])
    (line,) = Reader(tmp_path / "record").run.job["result"]
    assert line["found"] == found
    told = markdown(found)
    assert "Assumed, not measured: 4 nodes" in told and "Machine:" not in told and "e+0" not in told


def test_who_shares_cores_is_told_that_nothing_hides() -> None:
    machine = {**machines.machine(None), "cores": 2, "others": 0.0}
    results = {
        "ranks": 4,
        "nodes": 1,
        "parameters": 4,
        "compute_ms": 1.0,
        "samples": 1,
        "batch": 1,
        "machine": machine,
        "rates": APART.as_results(),
        "rows": as_rows(predictions(0.05)),
        "workers": None,
        "recommendation": "-",
    }
    assert "The 4 ranks have 2 cores" in markdown(results)
    assert "cores: communication in the background" not in markdown({**results, "machine": {**machine, "cores": 64}})


@pytest.mark.drill("a plan of real ranks")
@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_plan_is_made(tmp_path: Path, ranks: int, results_of: ResultsOf) -> None:
    done = run_plan(
        "-np",
        str(ranks),
        "--parameters",
        "200k",
        "--budget",
        "1",
        "--results",
        str(tmp_path),
        "--record",
        str(tmp_path / "record"),
    )
    assert done.returncode == 0, done.stderr
    found = results_of("plan")
    assert found["recommendation"] in done.stdout
    inside = found["rates"]["inside"]
    assert inside["alpha"] + inside["beta"] * 800_000 > 0
    steps = [row["step"] for row in found["rows"]]
    assert steps == sorted(steps), "the first row is what was measured to be quickest"
    assert found["rates"]["across"] is None
    measured = [row["measured"] for row in found["rows"] if row["measured"] is not None]  # what the budget allows
    assert len(measured) > 1 and all(one > 0 for one in measured)
    assert found["workers"]["chosen"] in (1, 2, 4, 8, 16)
    (line,) = Reader(tmp_path / "record").run.job["result"]
    assert line["found"] == found


@pytest.mark.parametrize("ranks", [["--nodes", "4x2", "--gbps", "10"], ["-np", "2"]])
def test_a_folder_for_results_that_cannot_be_made_is_refused_before_the_work(
    ranks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["plan", *ranks, "--results", str(tmp_path / "file" / "folder")]) == 2
    said = capsys.readouterr()
    assert "results cannot be written there: Not a directory; name another folder" in said.err and said.out == ""
