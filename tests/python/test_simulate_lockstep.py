"""The simulator's lock-step engine: its numerics against the real optimizer, its traffic against the transport's
counters, its time against arithmetic."""

from __future__ import annotations

import math
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sordino.torch as hvd
from sordino import sim
from sordino._core import (
    Dissemination,
    Exponential,
    Grouped,
    RandomCycle,
    RandomPull,
    Ring,
    Roulette,
    Star,
)
from sordino.algorithms import (
    DPSGD,
    AdaptiveInterval,
    Algorithm,
    AllReduce,
    Crossover,
    ElasticAveraging,
    GossipGraD,
    Layered,
    LocalSGD,
    ParameterSkipping,
    PushSum,
    SegmentedGossip,
    ThresholdScheduler,
    names,
    resolve,
)
from sordino.errors import UsageError
from sordino.simulate import lockstep
from sordino.simulate.images import Images
from sordino.simulate.images import Trainee as ImagesTrainee
from sordino.simulate.job import Job, Outcome
from sordino.simulate.links import Links
from sordino.simulate.phases import Sends
from sordino.simulate.quadratic import Quadratic
from sordino.simulate.record import Record
from sordino.simulate.timeline import Timeline
from sordino.simulate.traffic import InStep, Model, Rows, traffic_of
from sordino.simulate.training import train
from sordino.simulate.vectorized import numerics_of

WORKERS = 4
MIXES: dict[str, InStep] = {
    "crossover": Crossover(seed=3),
    "crossover-model": Crossover(segments="model", interval=2),
    "crossover-bytes": Crossover(segments=20),
    "crossover-patterns": Crossover(segments=("layers.1.*", "layers.[23].*")),
    "crossover-roulette": Crossover(roulette=[[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]),
    "dpsgd": DPSGD(),
    "dpsgd-blocks": DPSGD(segments="blocks"),
    "gossipgrad": GossipGraD(seed=5),
    "pushsum": PushSum(),
    "pushsum-two": PushSum(peers={0: 2, 3: 1}, segments="blocks"),
}
"""Those that keep the sum over workers."""
CHOICES: dict[str, InStep] = MIXES | {
    "allreduce": AllReduce(),
    "allreduce-late": AllReduce(double_buffering=True),
    "allreduce-segments": AllReduce(segment_bytes=16),
    "layered": Layered(),
    "layered-groups": Layered(group_size=2),
    "local-sgd": LocalSGD(interval=2),
    "local-sgd-groups": LocalSGD(interval=3, group_size=2, start=2),
    "local-sgd-allreduce": LocalSGD(interval=2, group_size=2, start=1, exchange="allreduce"),
    "local-sgd-gradients": LocalSGD(interval=2, group_size=2, aggregate="gradients"),
    "local-sgd-one": LocalSGD(interval=2, group_size=4),
    "caps": ParameterSkipping(),
    "caps-digits": ParameterSkipping(digits=0, threshold=50, probe_interval=2),
    "caps-probes": ParameterSkipping(threshold=0, probe_interval=2),
    "caps-blocks": ParameterSkipping(digits=0, threshold=40, granularity="block", block_bytes=64),
    "caps-servers": ParameterSkipping(digits=0, exchange="parameter-server"),
    "caps-server": ParameterSkipping(exchange="parameter-server", servers=1),
    "crossover-groups": Crossover(group_size=2, seed=1),
    "crossover-leaders": Crossover(group_size=2, within="leader"),
    "crossover-one": Crossover(group_size=4),
    "segmented": SegmentedGossip(seed=1),
    "segmented-replicas": SegmentedGossip(replicas=2),
    "pushsum-overlap": PushSum(overlap=2),
    "pushsum-overlap-two": PushSum(peers=2, overlap=1, interval=2),
    "elastic": ElasticAveraging(interval=2),
}


def job_of(algorithm: Algorithm, workers: int = WORKERS, **options: Any) -> Job:
    """Without data, on links that take no time."""
    given: dict[str, Any] = {
        "links": Links(np.full(workers, math.inf), 0.0),
        "compute": np.full(workers, 0.01),
        "message_bytes": 32.0,
        "data": "none",
        **options,
    }
    if "seconds" not in given:
        given = {"steps": 6, **given}
    return Job(algorithm, workers, **given)


def silent(part: float) -> None:
    """Progress that nobody watches."""


def model_of(job: Job, problem: Quadratic) -> Model:
    tensors = problem.tensors
    return Model([name for name, _ in tensors], [count for _, count in tensors], job.message_bytes / (4 * problem.size))


class OnTorch:
    """A worker of the quadratic, as a torch module."""

    def __init__(self, problem: Quadratic, worker: int) -> None:
        self.problem, self.worker = problem, worker
        count = len(problem.tensors)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(count))
        begin = 0
        self.sent: list[float] = []  # what the transport has counted by each gradient
        for layer, (_, length) in zip(self.model.layers, problem.tensors):
            layer.weight = torch.nn.Parameter(problem.values(worker)[begin : begin + length].clone())
            begin += length

    def backward(self) -> None:
        self.sent.append(hvd.stats()["bytes_sent"])
        parameters = list(self.model.parameters())
        values = torch.nn.utils.parameters_to_vector(parameters).detach()
        self.problem.values(self.worker).copy_(values)
        self.problem.gradient(self.worker)
        gradient = self.problem.kept_gradient(self.worker)
        # Through autograd, as a network's would come.
        (torch.nn.utils.parameters_to_vector(parameters) * gradient).sum().backward()


def really_trained(job: Job, steps: int) -> tuple[list[np.ndarray], list[OnTorch], list[np.ndarray | None]]:
    """Everybody's parameters after each step of the real optimizer."""
    problem = Quadratic(job)
    trainees = [OnTorch(problem, worker) for worker in range(job.workers)]
    seen: list[np.ndarray] = []
    skipped: list[np.ndarray | None] = []

    def goes_on(sent: np.ndarray | None) -> bool:
        vectors = [torch.nn.utils.parameters_to_vector(one.model.parameters()) for one in trainees]
        seen.append(torch.stack(vectors).detach().numpy().copy())
        skipped.append(sent)
        return len(seen) <= steps

    train(job, trainees, goes_on)
    return seen[1:], trainees, skipped[1:]


# ---- the problem -----------------------------------------------------------------------------------------------------


def test_a_quadratic_without_noise_goes_its_known_way() -> None:
    problem = Quadratic(job_of(AllReduce(), workers=3, lr=0.25, dimension=5), noise=0.0)
    targets = problem.targets.astype(np.float64)
    for step in range(1, 8):
        problem.move(problem.gradients())
        np.testing.assert_allclose(problem.parameters, targets * (1 - 0.75**step), rtol=1e-5)
    found, optimum = problem.evaluate(), targets.mean(axis=0)
    wanted = np.linalg.norm(problem.parameters - optimum, axis=1).mean()
    assert found["distance"] == pytest.approx(wanted, rel=1e-6)
    mean = problem.parameters.astype(np.float64).mean(axis=0)
    assert found["consensus_distance"] == pytest.approx(np.linalg.norm(problem.parameters - mean, axis=1).mean())
    problem.leave(1)
    wanted = np.linalg.norm(problem.parameters[[0, 2]] - optimum, axis=1).mean()
    assert problem.evaluate()["distance"] == pytest.approx(wanted, rel=1e-6)
    problem.parameters[:] = 1e3
    best = problem.final()
    assert best["best_distance"] < best["distance"]


@pytest.mark.parametrize("momentum", (0.0, 0.9))
def test_a_worker_alone_steps_as_among_all(momentum: float) -> None:
    job = job_of(AllReduce(), workers=7, momentum=momentum, lr=0.1, dimension=7, seed=2**63)
    together, apart = Quadratic(job), Quadratic(job)
    twin = torch.nn.Parameter(torch.zeros(7))
    sgd = torch.optim.SGD([twin], lr=0.1, momentum=momentum)
    for _ in range(5):
        together.move(together.gradients())
        for worker in (3, 0, 6, 1, 2, 5, 4):
            apart.gradient(worker)
            if worker == 5:
                twin.grad = apart.kept_gradient(5).clone()
            apart.step(worker)
        sgd.step()
    assert np.array_equal(together.parameters, apart.parameters)
    torch.testing.assert_close(apart.values(5), twin.detach())


def test_noise_is_normal_and_follows_the_seed() -> None:
    def drawn(seed: int) -> np.ndarray:
        problem = Quadratic(job_of(AllReduce(), workers=5000, seed=seed), noise=2.0)
        first, second = problem.gradients().copy(), problem.gradients().copy()
        places = problem.targets
        return np.concatenate([(first + places) / 2, (second + places) / 2, places - 1], axis=1)

    noise = drawn(1)
    assert np.array_equal(noise, drawn(1)) and not (noise == drawn(2)).any()
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01 and abs((noise**4).mean() - 3) < 0.1
    assert abs(np.corrcoef(noise.T) - np.eye(24)).max() < 0.07


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES)
def test_arrays_do_what_the_real_optimizer_does(choice: str) -> None:
    job = job_of(CHOICES[choice], lr=0.2, dimension=70 if choice == "caps-blocks" else 9, momentum=0.5, seed=4)
    wanted, _, skipped = really_trained(job, 7)
    problem = Quadratic(job)
    model = model_of(job, problem)
    numerics = numerics_of(job.algorithm, problem, model, traffic_of(job.algorithm, WORKERS, model).mixing)  # type: ignore[arg-type]
    for step, (values, really_sent) in enumerate(zip(wanted, skipped)):
        sent = numerics.step(step)
        np.testing.assert_allclose(problem.parameters, values, atol=3e-6)
        if isinstance(job.algorithm, ParameterSkipping):
            assert sent is not None and really_sent is not None and np.array_equal(sent, really_sent)
    if choice.startswith("caps-") and choice != "caps-server":
        assert not all(one.all() for one in skipped if one is not None)  # something has been skipped


@pytest.mark.parametrize("choice", ("allreduce", "crossover", "pushsum-overlap", "layered", "caps"))
def test_with_data_it_is_the_real_algorithm_bit_for_bit(choice: str) -> None:
    job = job_of(CHOICES[choice], data="digits", lr=0.1, steps=5, points=5, message_bytes=1e6)
    problem = Images(job)
    out = lockstep.with_data(job, silent, problem, [ImagesTrainee(job, worker) for worker in range(WORKERS)])

    others = [ImagesTrainee(job, worker) for worker in range(WORKERS)]

    def alone() -> torch.Tensor:
        trainee = others[hvd.rank()]
        optimizer = torch.optim.SGD(trainee.model.parameters(), lr=0.1)
        wrapped = hvd.DistributedOptimizer(optimizer, trainee.model.named_parameters(), algorithm=job.algorithm)
        for _ in range(5):
            wrapped.zero_grad()
            trainee.backward()
            wrapped.step()
        return torch.nn.utils.parameters_to_vector(trainee.model.parameters()).detach()

    for worker, wanted in enumerate(sim.run(WORKERS, alone, ranks_per_node=1)):
        assert torch.equal(problem.values(worker), wanted)
    assert len(out.record.curve) == 6 and out.final["accuracy"] > 0


def exchanged(choice: str, workers: int, rounds: int) -> Iterator[np.ndarray]:
    """Everybody's parameters, drawn at random, after each step at a learning rate of 0."""
    algorithm = CHOICES[choice]
    job = job_of(algorithm, workers=workers, lr=0.0)
    problem = Quadratic(job)
    problem.parameters[:] = np.random.default_rng(workers).normal(size=problem.parameters.shape)
    model = model_of(job, problem)
    numerics = numerics_of(algorithm, problem, model, traffic_of(algorithm, workers, model).mixing)
    for round in range(rounds):
        numerics.step(round)
        yield problem.parameters.astype(np.float64)


@pytest.mark.parametrize("workers", (2, 5, 64, 1000))
@pytest.mark.parametrize("choice", [choice for choice in MIXES if choice != "crossover-roulette"])
def test_mixing_keeps_the_mean_and_brings_workers_together(choice: str, workers: int) -> None:
    if choice == "pushsum-two" and workers == 2:
        return  # one worker has no two peers
    values = list(exchanged(choice, workers, 12))
    start = np.random.default_rng(workers).normal(size=values[0].shape).mean(axis=0)
    for now in values:
        np.testing.assert_allclose(now.mean(axis=0), start, atol=1e-6)
    spread = [float(now.std(axis=0).mean()) for now in values]
    assert spread[-1] < (0.7 if choice.startswith("dpsgd") else 0.5) * max(spread[0], 1e-6)  # a ring is slow


def test_allreduce_keeps_workers_equal() -> None:
    problem_of = Quadratic(job_of(AllReduce(), workers=50, lr=0.1))
    model = model_of(job_of(AllReduce()), problem_of)
    numerics = numerics_of(AllReduce(), problem_of, model, None)
    for step in range(200):
        numerics.step(step)
    assert (problem_of.parameters == problem_of.parameters[0]).all()
    assert problem_of.evaluate()["distance"] < 0.02


@pytest.mark.parametrize("size", (1, 2, 3, 8, 63, 66))
def test_rows_are_the_topologys(size: int) -> None:
    topologies = [
        RandomCycle(size, 1),
        Ring(size),
        Exponential(size, {0: 1}),
        Dissemination(size, 2),
        RandomPull(size, 3, 4, min(2, max(size - 1, 1))),
        Star(size, 1),
        Roulette(size, 4, list((1 - np.eye(size)).ravel())),
    ]
    topologies += [Star(size, 3), Grouped(Ring(size // 3), 3, True)] if size % 3 == 0 else []
    for topology in topologies:
        rows = Rows.of(topology, 5, 1)
        ends = np.cumsum(rows.counts)
        for worker in range(size):
            sources, keeps_own, scale = topology.row(5, 1, worker)
            assert rows.sources[ends[worker] - rows.counts[worker] : ends[worker]].tolist() == sources
            assert (rows.keeps_own[worker], rows.scale[worker]) == (keeps_own, pytest.approx(scale))


# ---- traffic ---------------------------------------------------------------------------------------------------------


def traffic_seconds(job: Job, sent: list[np.ndarray | None], steps: range) -> np.ndarray:
    """The bytes that every worker sends in these steps, by the pattern."""
    problem = Quadratic(job)
    traffic = traffic_of(job.algorithm, job.workers, model_of(job, problem))  # type: ignore[arg-type]
    timeline = Timeline(job, Record(job.workers))
    for step in steps:
        timeline.step(traffic.phases(step, sent[step]))
    return timeline.record.bytes


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if not {"late", "overlap"} & set(choice.split("-"))])
def test_bytes_are_those_that_the_transport_counts(choice: str) -> None:
    algorithm, dimension, first = CHOICES[choice], 9600, 1
    if choice in ("allreduce-segments", "crossover-bytes"):
        small: dict[str, Any] = {"segment_bytes": 20_000} if choice == "allreduce-segments" else {"segments": 20_000}
        algorithm = replace(algorithm, **small)
        first = 2  # the plan is made in the first step, and later gradients are the first to be sent
    if isinstance(algorithm, ParameterSkipping):
        algorithm = replace(algorithm, digits=3, threshold=40.0)
    job = job_of(algorithm, dimension=dimension, message_bytes=4.0 * dimension, lr=0.2)
    _, trainees, sent = really_trained(job, 8)
    counted = np.array([trainee.sent[7] - trainee.sent[first] for trainee in trainees])
    wanted = traffic_seconds(job, sent, range(first, 7))
    assert counted.max() > 0
    if isinstance(algorithm, (AllReduce, Layered, LocalSGD)) or getattr(algorithm, "group_size", 1) > 1:
        np.testing.assert_allclose(counted, wanted, rtol=0.015)  # flags beside gradients, and padding
    else:
        np.testing.assert_array_equal(counted, wanted)


@pytest.mark.parametrize("workers", (2, 3, 5, 6))
def test_bytes_of_other_numbers_of_workers(workers: int) -> None:
    for dimension in (960, 9600):
        for algorithm in (AllReduce(), LocalSGD(interval=1), DPSGD(), ElasticAveraging(), PushSum()):
            job = job_of(algorithm, workers, dimension=dimension, message_bytes=4.0 * dimension)
            _, trainees, sent = really_trained(job, 3)
            counted = np.array([trainee.sent[2] - trainee.sent[1] for trainee in trainees])
            np.testing.assert_allclose(counted, traffic_seconds(job, sent, range(1, 2)), rtol=0.01)


def test_messages_are_as_large_as_said() -> None:
    out = lockstep.run(job_of(Crossover(), message_bytes=4e6, steps=5), silent)
    assert out.record.bytes.tolist() == [5 * 4e6] * WORKERS
    assert out.record.messages.tolist() == [5 * 4] * WORKERS


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES)
def test_nothing_is_waited_for_where_links_take_no_time(choice: str) -> None:
    out = lockstep.run(job_of(CHOICES[choice], steps=6), silent)
    assert out.seconds == pytest.approx(0.06) and out.record.waiting.tolist() == [0.0] * WORKERS
    assert out.record.computing.tolist() == pytest.approx([0.06] * WORKERS)
    assert out.record.messages.sum() > 0 and out.record.steps.tolist() == [6] * WORKERS


def seconds_of(algorithm: Algorithm, gbps: list[float], latency: float = 0.0, **options: Any) -> Outcome:
    """A run over links, of models of 10^6 bytes (8 ms at 1 Gb/s), where a step takes 10 ms."""
    job = job_of(algorithm, len(gbps), links=Links(gbps, latency), message_bytes=1e6, **options)
    return lockstep.run(job, silent)


def test_a_ring_goes_as_fast_as_its_slowest_link() -> None:
    out = seconds_of(AllReduce(), [1.0, 10.0, 2.0, 1.0, 10.0], latency=0.001, steps=3)
    rounds = 2 * 4 * (0.001 + 0.008 / 5)
    assert out.seconds == pytest.approx(3 * (0.01 + rounds))
    assert out.record.waiting.tolist() == pytest.approx([3 * rounds] * 5)
    assert out.record.messages.tolist() == [24] * 5
    late = seconds_of(AllReduce(), [1.0] * 4, steps=3, compute=np.array([0.01, 0.01, 0.05, 0.01]))
    rounds = 6 * 0.002
    assert late.record.waiting.tolist() == pytest.approx([3 * (rounds + 0.04)] * 2 + [3 * rounds, 3 * (rounds + 0.04)])


def test_small_all_reduces_take_as_many_rounds_as_doublings() -> None:
    job = job_of(AllReduce(), 5, links=Links([1.0] * 5, 0.001), message_bytes=1000.0, steps=1)
    out = lockstep.run(job, silent)
    assert out.seconds == pytest.approx(0.01 + 4 * (0.001 + 8e-6))  # to the power of two, twice, and back
    assert out.record.messages.tolist() == [3, 2, 2, 2, 1]


def test_a_link_carries_one_transfer_at_a_time() -> None:
    out = seconds_of(DPSGD(), [1.0] * 5, steps=1)
    assert out.seconds == pytest.approx(0.01 + 2 * 0.008)
    out = seconds_of(DPSGD(), [1.0, 1.0], steps=1)
    assert out.seconds == pytest.approx(0.01 + 0.008)
    out = seconds_of(Layered(group_size=4), [1.0] * 4, steps=1)
    assert out.seconds == pytest.approx(0.01 + 6 * 0.008)


def test_a_slow_worker_delays_its_neighbours_only() -> None:
    compute = np.full(8, 0.01)
    compute[3] = 0.1
    job = job_of(DPSGD(), 8, compute=compute, steps=2)
    out = lockstep.run(job, silent)
    assert out.record.waiting.tolist() == pytest.approx([0.0, 0.09, 0.18, 0.0, 0.18, 0.09, 0.0, 0.0])


def test_the_gantt_shows_what_is_summed_up() -> None:
    compute = np.array([0.01, 0.02, 0.03, 0.01])
    out = seconds_of(Crossover(), [1.0, 2.0, 1.0, 4.0], 0.001, steps=6, compute=compute, spans_until=10.0)
    for kind, sums in (("compute", out.record.computing), ("wait", out.record.waiting)):
        for worker in range(4):
            spans = [span for span in out.record.spans if span.kind == kind and span.worker == worker]
            assert sum(span.end - span.begin for span in spans) == pytest.approx(sums[worker])
    transfers = [span for span in out.record.spans if span.kind == "transfer"]
    assert len(transfers) == out.record.messages.sum() == 6 * 4 * 4
    for one in transfers:
        for other in transfers:
            if one is not other and (one.worker == other.worker or one.peer == other.peer):
                assert one.end <= other.begin or other.end <= one.begin
    without = seconds_of(Crossover(), [1.0, 2.0, 1.0, 4.0], 0.001, steps=6, compute=compute)
    assert without.record.as_dict(True) == out.record.as_dict(True) and not without.record.spans


def test_ages_are_since_the_copy() -> None:
    out = seconds_of(DPSGD(), [1.0] * 5, steps=2)
    assert out.record.pulls.tolist() == [4] * 5 and out.record.oldest == pytest.approx(0.016)
    assert out.record.ages.tolist() == pytest.approx([4 * 0.016] * 5)


def test_what_hides_communication() -> None:
    gbps, rounds = [1.0] * 4, 6 * 0.002  # less than loading, more than computing
    plain = seconds_of(AllReduce(), gbps, steps=4, load=0.02)
    assert plain.seconds == pytest.approx(4 * (0.03 + rounds))
    layered = seconds_of(Layered(), gbps, steps=4, load=0.02)
    assert layered.seconds == pytest.approx(4 * 0.03) and not layered.record.waiting.any()
    layered = seconds_of(Layered(), gbps, steps=4, load=0.004)
    assert layered.seconds == pytest.approx(4 * (0.01 + rounds))
    assert layered.record.waiting.tolist() == pytest.approx([4 * (rounds - 0.004)] * 4)
    late = seconds_of(AllReduce(double_buffering=True), gbps, steps=4)
    assert late.seconds == pytest.approx(0.02 + 0.002 + 0.012 + 0.012)  # reductions follow each other
    push = seconds_of(PushSum(), gbps, steps=4)
    assert push.seconds == pytest.approx(4 * (0.018 + 64e-9))
    for overlap in (1, 2):
        push = seconds_of(PushSum(overlap=overlap), gbps, steps=4)
        assert push.seconds == pytest.approx(4 * 0.01) and not push.record.waiting.any()
    slow = seconds_of(PushSum(overlap=1), [0.5] * 4, steps=4)
    assert slow.seconds == pytest.approx(0.02 + 0.006 + 0.016 + 0.016, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_transfers_are_those_of_one_message_after_another(data: st.DataObject) -> None:
    workers = data.draw(st.integers(2, 6))
    worker = st.integers(0, workers - 1)
    messages = data.draw(st.lists(st.tuples(worker, worker).filter(lambda ends: ends[0] != ends[1]), max_size=20))
    rates = [data.draw(st.sampled_from((0.5, 1.0, 4.0, math.inf))) for _ in range(workers)]
    latency = data.draw(st.sampled_from((0.0, 0.001)))
    compute = np.array([data.draw(st.sampled_from((0.01, 0.02, 0.05))) for _ in range(workers)])
    job = job_of(DPSGD(), workers, links=Links(rates, latency), compute=compute)
    timeline = Timeline(job, Record(workers))
    clock, out, into = [0.0] * workers, [0.0] * workers, [0.0] * workers
    ends = np.array(messages, np.int64).reshape(-1, 2)
    for _ in range(2):
        timeline.step([Sends(ends[:, 0], ends[:, 1], 1e6)])
        ready = [time + float(takes) for time, takes in zip(clock, job.compute)]
        clock = list(ready)
        for source, target in messages:
            takes, end = job.links.seconds(source, target, 1e6), ready[source]
            if takes > 0:
                end = out[source] = into[target] = max(end, out[source], into[target]) + takes
            clock[target] = max(clock[target], end)
        assert timeline.clock.tolist() == clock


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ("none", "digits"))
@pytest.mark.parametrize("name", names())
def test_every_algorithm_runs(name: str, data: str) -> None:
    if name in ("scheduled-pull", "adpsgd"):
        return
    parts: list[float] = []
    options: dict[str, Any] = {"data": data, "links": Links([1.0] * 3, 0.001), "message_bytes": 1e5, "points": 2}
    out = lockstep.run(job_of(resolve(name), 3, steps=4, **options), parts.append)
    assert parts == sorted(parts) and parts[-1] == 1.0
    assert out.record.curve[0]["time"] == 0.0 and len(out.record.curve) == 3
    assert out.record.curve[-1]["time"] == out.seconds >= 0.0399
    assert out.final.keys() >= {"consensus_distance", "accuracy" if data == "digits" else "distance"}
    timed = lockstep.run(job_of(resolve(name), 3, seconds=0.1, **options), silent)
    slowest = out.record.computing.max() / 4
    assert 0.1 - slowest < timed.seconds and timed.record.steps[0] == timed.record.steps.min() > 1
    assert timed.record.curve[-1]["time"] == timed.seconds


def test_a_step_begins_only_if_its_computation_ends_in_time() -> None:
    for seconds, steps in ((0.055, 5), (0.049, 4), (0.005, 0)):
        out = lockstep.run(job_of(DPSGD(), seconds=seconds, compute=np.array([0.01, 0.01, 0.01, 0.005])), silent)
        assert out.record.steps.tolist() == [steps] * WORKERS and out.seconds == pytest.approx(steps * 0.01)
        assert out.record.curve[-1]["time"] == out.seconds


@pytest.mark.parametrize("choice", ("crossover", "caps", "pushsum-overlap"))
def test_one_worker_trains_alone(choice: str) -> None:
    for data in ("none", "digits"):
        out = lockstep.run(job_of(CHOICES[choice], 1, steps=3, data=data), silent)
        assert out.seconds == pytest.approx(0.03) and not out.record.messages.any()


def test_a_run_follows_from_its_seed() -> None:
    def found(**options: Any) -> dict[str, Any]:
        out = lockstep.run(job_of(Crossover(), links=Links([1.0] * 4, 0.0), **options), silent)
        return {**out.record.as_dict(True), **out.final}

    assert found() == found() != found(seed=1)
    assert found(data="digits") == found(data="digits") != found(data="digits", seed=1)


@pytest.mark.parametrize("wrong", ("a gradient", "an evaluation"))
def test_what_goes_wrong_in_a_rank_is_raised(wrong: str) -> None:
    job = job_of(LocalSGD(interval=50), steps=5)  # nobody would notice in an exchange that a rank is gone
    problem = Quadratic(job)
    trainees = [OnTorch(problem, worker) for worker in range(WORKERS)]
    seen = 0

    def fail() -> None:
        raise RuntimeError("this is it")

    def goes_on(sent: np.ndarray | None) -> bool:
        nonlocal seen
        seen += 1
        if seen == 3:
            if wrong == "an evaluation":
                fail()
            trainees[2].backward = fail  # type: ignore[method-assign]
        return True

    with pytest.raises(RuntimeError, match="this is it"):
        train(job, trainees, goes_on)


def test_an_interrupt_ends_all_ranks() -> None:
    job = job_of(DPSGD())
    problem = Quadratic(job)
    trainees = [OnTorch(problem, worker) for worker in range(WORKERS)]
    seen = 0

    def goes_on(sent: np.ndarray | None) -> bool:
        nonlocal seen
        seen += 1
        if seen == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return seen < 20_000

    with pytest.raises(KeyboardInterrupt):
        train(job, trainees, goes_on)
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("rank-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert seen < 20_000


@dataclass(frozen=True)
class Refused:
    algorithm: Algorithm
    text: str
    data: str = "digits"


@pytest.mark.parametrize(
    "case",
    [
        Refused(Layered(communicator="rank"), r"communicator='rank'"),
        Refused(ParameterSkipping(exchange="parameter-server", servers=1, dedicated_servers=True), "dedicated_servers"),
        Refused(ParameterSkipping(scheduler=ThresholdScheduler()), "scheduler="),
        Refused(ParameterSkipping(statistics_interval=5), "statistics_interval=5"),
        Refused(LocalSGD(adaptive=AdaptiveInterval(4)), "adaptive="),
        Refused(LocalSGD(start="decay"), "start='decay'"),
        Refused(LocalSGD(log_distance=3), "log_distance=3"),
        Refused(DPSGD(buffers="average"), "buffers='average'"),
        Refused(ElasticAveraging(buffers="average"), "buffers='average'"),
        Refused(ParameterSkipping(detector="random"), "detector='random'", "none"),
        Refused(ParameterSkipping(sample_ratio=0.5), "sample_ratio=0.5", "none"),
        Refused(ParameterSkipping(detector="history", survey_interval=3), "detector='history'", "none"),
        Refused(Layered(check_stale=True), "check_stale=True", "none"),
        Refused(Crossover(segments=("nothing*",)), r"'nothing\*' matches no parameter", "none"),
        Refused(Crossover(group_size=3), "does not divide 4", "none"),
    ],
    ids=lambda case: case.text,
)
def test_settings_without_effect_are_refused(case: Refused) -> None:
    with pytest.raises(UsageError, match=case.text):
        lockstep.run(job_of(case.algorithm, data=case.data), silent)


def test_other_refusals() -> None:
    with pytest.raises(UsageError, match=r"--kill 1@2\.5: .*DPSGD"):
        lockstep.run(job_of(DPSGD(), kills=((1, 2.5),)), silent)
    with pytest.raises(UsageError, match=r"servers=None.*20000000000 messages"):
        lockstep.run(job_of(ParameterSkipping(exchange="parameter-server"), 100_000), silent)


@pytest.mark.parametrize("choice", ("allreduce", "crossover", "pushsum", "gossipgrad", "dpsgd", "layered-groups"))
def test_many_workers(choice: str) -> None:
    workers = 20_000
    run: Callable[[], Outcome] = lambda: seconds_of(CHOICES[choice], [1.0] * workers, steps=2)  # noqa: E731
    tracemalloc.start()
    try:
        out = run()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1000 * workers
    assert out.record.bytes.mean() > 1e6 and out.final["distance"] < out.record.curve[0]["distance"]
