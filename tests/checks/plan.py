"""Plans compared with ranks: the transport counts the predicted bytes, and distances of local models follow the
formula."""

from __future__ import annotations

import pytest
import torch

import sordino.torch as hvd
from checks.registry import Seat, check
from sordino import plan
from sordino.algorithms import DPSGD, AllReduce, CaPS, Crossover, DiLoCo, ElasticAveraging, Layered, LocalSGD, NoLoCo
from sordino.codecs import Codec, Int4, PowerSGD
from sordino.plan import links

SHAPES = [(f"blocks.{k}.weight", (length,)) for k, length in enumerate((30000, 50000, 41000, 60000, 25000))]
STEPS = 8


@check(least=2, quick=("sim-5x2", "mpi-4x2"))
def the_bytes_of_a_plan_are_those_of_the_transport(seat: Seat) -> None:
    """The bytes that each rank sends between nodes are the predicted ones, for every algorithm."""
    nodes = plan.nodes_of_ranks()
    skipping = [CaPS(threshold=101, exchange=way) for way in ("allreduce", "parameter-server")]
    outer = [DiLoCo(interval=2, outer_momentum=0.5), NoLoCo(interval=2, gamma=0.2, segments="blocks")]
    encoded = [Crossover(compression="int8"), DPSGD(compression="int4"), NoLoCo(interval=2, compression="float16")]
    # An all-to-all of less than 64 KiB, such as that of 4 bits, sends all values to every node.
    candidates = [one for one in plan.candidates(nodes, interval=2) if getattr(one, "compression", None) != Int4()]
    if max(nodes) + 1 == seat.size:  # else, ranks of a node send some of each other's encoded values
        encoded += [LocalSGD(interval=2, compression="int8")]
    for algorithm in [*candidates, *skipping, *outer, *encoded]:
        named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES]
        for _, parameter in named:
            parameter.grad = torch.zeros_like(parameter)
        sgd = torch.optim.SGD([parameter for _, parameter in named], lr=0.0)
        optimizer = hvd.DistributedOptimizer(sgd, named, algorithm=algorithm)
        steps = STEPS
        if isinstance(algorithm, (DiLoCo, NoLoCo)):  # the first step is a broadcast, and every second step an exchange
            optimizer.step()
            steps *= 2
        elif isinstance(algorithm, (AllReduce, Layered, LocalSGD, ElasticAveraging)):
            for _ in range(2):  # an elastic center begins with an average
                optimizer.step()
        optimizer.flush()
        before = hvd.stats()["bytes_sent_across_nodes"]
        for _ in range(steps):
            optimizer.step()
        optimizer.flush()
        found = hvd.stats()["bytes_sent_across_nodes"] - before
        cost = plan.cost_of(algorithm, nodes, [name for name, _ in SHAPES], [4 * shape[0] for _, shape in SHAPES])
        # Slightly more is sent: flags, weights, the agreement of flush(), and padding of shards.
        assert found == pytest.approx(steps * cost.sent()[seat.rank], rel=2e-3, abs=100), algorithm


@check(least=2, codec=(PowerSGD(60), PowerSGD(180), None), quick=("sim-5x2",))
def the_bytes_of_gradients_are_those_of_the_transport(seat: Seat, codec: Codec | None) -> None:
    # In each bucket, both factors have more than 64 KiB: smaller operations run in turns, which send their bytes again
    # if a rank is late.
    nodes, shapes = plan.nodes_of_ranks(), [(400, 300), (700,), (300, 20, 20), (50, 1)]
    named = [(f"p{k}", torch.nn.Parameter(torch.zeros(shape))) for k, shape in enumerate(shapes)]
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    sgd = torch.optim.SGD([parameter for _, parameter in named], lr=0.0)
    algorithm = AllReduce(bucket_bytes=490_000)
    optimizer = hvd.DistributedOptimizer(sgd, named, codec or hvd.Compression.none, algorithm=algorithm)
    for _ in range(2):
        optimizer.step()
    before = hvd.stats()["bytes_sent_across_nodes"]
    for _ in range(STEPS):
        optimizer.step()
    found = hvd.stats()["bytes_sent_across_nodes"] - before
    sizes = [4 * parameter.numel() for _, parameter in named]
    cost = plan.cost_of(algorithm, nodes, [name for name, _ in named], sizes, codec, shapes)
    total = float(hvd.allreduce(torch.tensor(float(found), dtype=torch.float64), op=hvd.Sum, name="total"))
    assert total == pytest.approx(STEPS * sum(cost.sent()), rel=3e-3)  # slightly more is sent: flags


@check(least=2)
def links_are_measured(seat: Seat) -> None:
    rates, samples = plan.measure(1 << 18, 1.0)
    nodes = plan.nodes_of_ranks()
    share = max(nodes) + 1 < seat.size
    places = [place for place, found in (("inside", share), ("across", max(nodes) > 0)) if found]
    assert sorted({place for place, _, _ in samples}) == sorted(places)
    assert (rates.across is not None) == (max(nodes) > 0)
    assert rates.inside is not None
    assert share or rates.inside.alpha == 0  # ranks that share no memory time a copy, which is no message
    for line in (rates.inside, rates.across):
        assert line is None or (line.alpha >= 0 and line.beta >= 0 and line.alpha + line.beta > 0)
    assert rates.agreement >= 0
    assert {size for _, size, _ in samples} >= {4096, 1 << 17}
    assert rates.handling >= 0
    assert rates.hop >= 0
    for place, size, seconds in samples:
        assert seconds > 0, (place, size)
    seat.same("rates", rates)


@check(least=2, length=(1, 1 << 15))
def what_an_agreement_is_taken_off_from_is_agreed_on(seat: Seat, length: int) -> None:
    """The latency measurement subtracts the time of an agreement. Operations that repeat need no agreement. Subtracting
    its time from theirs would leave no time for the hops."""

    def others() -> float:
        stats = hvd.stats()
        return stats["operations"] - stats["operations_in_one_shot"]

    before = others()
    links._all_reduce(torch.zeros(length), "plan.some")
    assert others() - before >= 35


def quadratic() -> plan.Task:
    """Return a task in which every worker draws its own targets."""

    def loss(model: torch.nn.Module, worker: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * worker + step)
        inputs = torch.randn(5, 7, generator=generator)
        return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()

    def model() -> torch.nn.Module:
        linear = torch.nn.Linear(7, 1)
        torch.nn.init.constant_(linear.weight, 0.2)
        torch.nn.init.zeros_(linear.bias)
        return linear

    return plan.Task(model, lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.5), loss)


def reference(count: int, interval: int, averagings: int, rule: str) -> list[float]:
    """Return the distances in float64, with the equations of SGD written out."""
    scale = {"linear": count, "sqrt": count**0.5, "none": 1}[rule]
    warm_up = -(-interval * averagings // 4)
    weights = [torch.cat([torch.full((7,), 0.2), torch.zeros(1)]).double() for _ in range(count)]
    speeds = [torch.zeros(8, dtype=torch.float64) for _ in range(count)]
    found = []
    for step in range(interval * averagings):
        rate = 0.01 * (1 + (scale - 1) * min(step / warm_up, 1))
        for worker in range(count):
            generator = torch.Generator().manual_seed(100 * worker + step)
            inputs = torch.randn(5, 7, generator=generator).double()
            rows = torch.cat([inputs, torch.ones(5, 1, dtype=torch.float64)], 1)
            gradient = 2 * rows.T @ (rows @ weights[worker] - inputs.sum(1)) / 5
            speeds[worker] = 0.5 * speeds[worker] + gradient
            weights[worker] = weights[worker] - rate * speeds[worker]
        if (step + 1) % interval == 0:
            mean = sum(weights) / count
            found.append(sum(float((one - mean).norm()) for one in weights) / count)
            weights = [mean.clone() for _ in range(count)]
    return found


@check(rule=("linear", "sqrt", "none"))
def local_models_are_apart_as_the_formula_says(seat: Seat, rule: str) -> None:
    found = plan.find_workers(quadratic(), (2, 3, 5), interval=3, averagings=8, rule=rule)
    for count, curve in found.curves.items():
        assert curve == pytest.approx(reference(count, 3, 8, rule), rel=1e-4)
        assert found.distances[count] == pytest.approx(sum(curve[2:]) / 6)
    assert (found.chosen, found.reason) == plan.choose(found.distances, 0.85)
    seat.same("found", found.distances, found.chosen)


@check()
def local_models_that_diverge_are_not_chosen(seat: Seat) -> None:
    task = quadratic()
    fast = plan.Task(task.model, lambda parameters: torch.optim.SGD(parameters, lr=0.15), task.loss)
    found = plan.find_workers(fast, (2, 16), interval=3, averagings=12)
    assert found.distances[16] == float("inf")
    assert (found.chosen, "P=16" in found.reason) == (2, True)
