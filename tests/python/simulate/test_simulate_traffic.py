"""The simulator's lock-step engine: its traffic against the transport's counters, its time against arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_cases import CHOICES, WORKERS, job_of, really_trained, seconds_of, silent

import sordino.torch as hvd
from sordino.algorithms import (
    DPSGD,
    AllReduce,
    CaPS,
    Crossover,
    DiLoCo,
    ElasticAveraging,
    Layered,
    LocalSGD,
    NoLoCo,
    PushSum,
)
from sordino.algorithms.traffic import Model
from sordino.cli.app import main
from sordino.codecs import Codec, Int8, PowerSGD
from sordino.errors import UsageError
from sordino.simulate import lockstep
from sordino.simulate.checks import check
from sordino.simulate.images import Trainee
from sordino.simulate.job import Job
from sordino.simulate.links import Links
from sordino.simulate.phases import Sends
from sordino.simulate.quadratic import Quadratic
from sordino.simulate.record import Record
from sordino.simulate.timeline import Timeline
from sordino.simulate.traffic import StepMessages
from sordino.simulate.training import train

# ---- traffic ---------------------------------------------------------------------------------------------------------

# The core repeats collectives of up to 64 KiB per rank in turns, without a negotiation. If a rank comes 10 ms late to a
# turn, the operation is repeated with a negotiation, and the bytes that others have sent for it count twice. Ranks are
# late on a busy machine, so here values have more bytes, or the step with the fewest bytes counts.


@pytest.mark.parametrize("scale", (0.1, 0.3, 0.7, 3.3))
@pytest.mark.parametrize("exchange", ("allreduce", "parameter-server"))
def test_there_are_as_many_blocks_as_in_training(scale: float, exchange: Any) -> None:
    """Simulated links may count more or fewer bytes than the real model has; tensors are cut as in training."""
    sizes = [786432, 4096, 3 * 4096, 4 * 999]
    algorithm = CaPS(granularity="block", block_bytes=4096, exchange=exchange)
    count = len(algorithm.items_of(sizes))
    (phase,) = algorithm.traffic(Model("abcd", [size * scale for size in sizes], scale), range(4)).phases
    assert len(phase.at(0, np.ones(count, dtype=bool))) >= 2


def simulated_bytes(job: Job, sent: list[np.ndarray | None], steps: range) -> np.ndarray:
    """Return the bytes that each worker sends in these steps according to the simulator, float64 [workers]."""
    problem = Quadratic(job)
    traffic = lockstep.traffic_of(job, problem, problem.tensors)
    timeline = Timeline(job, Record(job.workers))
    for step in steps:
        timeline.step(traffic.phases(step, sent[step]))
    return timeline.record.bytes


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if not {"late", "overlap"} & set(choice.split("-"))])
def test_bytes_are_those_that_the_transport_counts(choice: str) -> None:
    algorithm, dimension, first = CHOICES[choice], 96_000, 1
    if choice in ("allreduce-segments", "crossover-bytes"):
        small: dict[str, Any] = {"bucket_bytes": 200_000} if choice == "allreduce-segments" else {"segments": 200_000}
        algorithm = replace(algorithm, **small)
        first = 2  # the first step makes the plan, and later gradients are the first to be sent
    if isinstance(algorithm, CaPS):
        algorithm = replace(algorithm, digits=3, threshold=40.0)
    job = job_of(algorithm, dimension=dimension, message_bytes=4.0 * dimension, lr=0.2)
    _, trainees, sent = really_trained(job, 8)
    counted = np.array([trainee.sent[7] - trainee.sent[first] for trainee in trainees])
    wanted = simulated_bytes(job, sent, range(first, 7))
    assert counted.max() > 0
    if isinstance(algorithm, (AllReduce, Layered, LocalSGD)) or getattr(algorithm, "group_size", 1) > 1:
        np.testing.assert_allclose(counted, wanted, rtol=0.015)  # flags with the gradients, and padding
    elif isinstance(algorithm, CaPS):
        np.testing.assert_allclose(counted, wanted, rtol=1e-4)  # flags of items are small, so they may be sent twice
    else:
        np.testing.assert_array_equal(counted, wanted)


@pytest.mark.parametrize("codec", ("int8", "Int4(block=32)", "TopK(ratio=0.125, chunk=64)"))
@pytest.mark.parametrize("cls", (DiLoCo, LocalSGD))
def test_bytes_of_encoded_means(codec: str, cls: Any) -> None:
    dimension = 480_000  # encoded shards, and the encoded values of TopK, are larger than 64 KiB
    job = job_of(cls(interval=2, compression=codec), dimension=dimension, message_bytes=4.0 * dimension)
    _, trainees, sent = really_trained(job, 6, late=True)
    counted = np.array([trainee.sent[5] - trainee.sent[1] for trainee in trainees])
    np.testing.assert_allclose(counted, simulated_bytes(job, sent, range(1, 5)), rtol=0.05)  # shards are padded


@pytest.mark.parametrize("algorithm", (Crossover(compression="int4"), NoLoCo(interval=2, peers=3, compression="int8")))
def test_bytes_of_encoded_gossip(algorithm: Crossover | NoLoCo) -> None:
    dimension = 9600  # whole blocks
    job = job_of(algorithm, dimension=dimension, message_bytes=4.0 * dimension)
    _, trainees, sent = really_trained(job, 6)
    counted = np.array([trainee.sent[5] - trainee.sent[1] for trainee in trainees])
    np.testing.assert_allclose(counted, simulated_bytes(job, sent, range(1, 5)), rtol=0.02)  # blocks are padded
    with pytest.raises(UsageError, match="cannot be simulated without data"):
        check(job)


def test_encoded_gossip_is_one_message_for_each_peer() -> None:
    model = Model(["a.weight", "b.weight", "c.weight"], [1e5, 2e5, 3e5])
    plain, encoded = (
        StepMessages(DPSGD(segments="blocks", compression=codec), 5, model).phases(0, None)[0]
        for codec in (None, "int8")
    )
    assert isinstance(plain, Sends) and isinstance(encoded, Sends)
    assert len(plain.sources) == 3 * 10 and len(encoded.sources) == 10
    assert set(zip(encoded.sources.tolist(), encoded.targets.tolist())) == {
        (worker, (worker + way) % 5) for worker in range(5) for way in (1, -1)
    }
    np.testing.assert_allclose(encoded.bytes, 6e5 * Int8().relative_size, rtol=1e-6)


class Matrices:
    """A worker with constant gradients, which notes the transport's byte count before each backward pass.

    The gradients are too large for one-shot operations, whose number of messages varies.
    """

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 250), torch.nn.Linear(250, 1))
        self.sent: list[float] = []

    def backward(self) -> None:
        self.sent.append(hvd.stats()["bytes_sent"])
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("codec", (PowerSGD(60), PowerSGD(180), Int8(32)))
@pytest.mark.parametrize("algorithm", (AllReduce(), AllReduce(bucket_bytes=410_000), LocalSGD(50, group_size=2)))
def test_bytes_of_gradients_with_a_codec(codec: Codec, algorithm: Any) -> None:
    if isinstance(algorithm, LocalSGD):
        algorithm = replace(algorithm, exchange="allreduce")
    trainees = [Matrices() for _ in range(WORKERS)]
    job = job_of(algorithm, codec=codec, message_bytes=4.0 * sum(one.numel() for one in trainees[0].model.parameters()))
    turns = iter(range(6))
    train(job, trainees, lambda _: next(turns) < 5)
    named = list(trainees[0].model.named_parameters())
    model = Model(
        [name for name, _ in named], [4 * one.numel() for _, one in named], 1.0, codec, [one.shape for _, one in named]
    )
    traffic, timeline = StepMessages(algorithm, WORKERS, model), Timeline(job, Record(WORKERS))
    for step in range(1, 4):  # the first step makes the plan
        timeline.step(traffic.phases(step, None))
    counted = np.array([trainee.sent[4] - trainee.sent[1] for trainee in trainees])
    assert counted.max() > 0
    np.testing.assert_allclose(counted, timeline.record.bytes, rtol=0.05)  # flags; shards are padded
    with pytest.raises(UsageError, match="shapes"):
        StepMessages(algorithm, WORKERS, Model(["a"], [4.0], codec=PowerSGD()))


def test_compression_on_the_command_line(tmp_path: Path) -> None:
    """Workers send the bytes of the codec for the shapes of the network."""
    found = tmp_path / "found.json"
    words = "--algorithm allreduce --data digits --channels 4 --images 64 --steps 2 --workers 3 --compute-ms 1 --quiet"
    assert (
        main(["simulate", *words.split(), "--processes", "1", "--compression", "powersgd", "--json", str(found)]) == 0
    )
    results = json.loads(found.read_text())
    job = Job(AllReduce(), 1, Links([1.0], 0.0), np.ones(1), 1.0, 1, data="digits", channels=4, images=64)
    shapes = [one.shape for one in Trainee(job, 0).model.parameters()]
    left, right = PowerSGD().numbers(shapes)
    assert left > 0 and left + right < sum(math.prod(shape) for shape in shapes)
    assert results["setting"]["compression"] == "PowerSGD(rank=4)"
    assert results["runs"][0]["bytes"] == pytest.approx(2 * 2 * (2 / 3) * 4 * (left + right), rel=1e-6)


def test_codecs_that_cannot_be_simulated() -> None:
    with pytest.raises(UsageError, match="without data"):
        check(job_of(AllReduce(), codec=PowerSGD()))
    with pytest.raises(UsageError, match="sends no gradients"):
        check(job_of(DPSGD(), codec=PowerSGD(), data="digits"))


@pytest.mark.parametrize("workers", (2, 3, 5, 6))
def test_bytes_of_other_numbers_of_workers(workers: int) -> None:
    for dimension in (960, 9600):
        for algorithm in (AllReduce(), LocalSGD(interval=1), DPSGD(), ElasticAveraging(), PushSum()):
            job = job_of(algorithm, workers, dimension=dimension, message_bytes=4.0 * dimension)
            _, trainees, sent = really_trained(job, 6)
            counted = np.diff([trainee.sent[1:] for trainee in trainees]).min(axis=1)
            np.testing.assert_allclose(counted, simulated_bytes(job, sent, range(1, 2)), rtol=0.01)


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
    assert out.seconds == pytest.approx(0.01 + 4 * (0.001 + 8e-6))  # one round to a power of two, 2 doublings, one back
    assert out.record.messages.tolist() == [3, 2, 2, 2, 1]


def test_a_link_carries_one_transfer_at_a_time() -> None:
    out = seconds_of(DPSGD(), [1.0] * 5, steps=1)
    assert out.seconds == pytest.approx(0.01 + 2 * 0.008)
    out = seconds_of(DPSGD(), [1.0, 1.0], steps=1)
    assert out.seconds == pytest.approx(0.01 + 0.008)
    out = seconds_of(Layered(group_size=4), [1.0] * 4, steps=1)
    assert out.seconds == pytest.approx(0.01 + 6 * 0.008)


def test_a_slow_worker_delays_its_neighbors_only() -> None:
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
            spans = [span for span in out.record.spans if span.activity == kind and span.worker == worker]
            assert sum(span.end - span.begin for span in spans) == pytest.approx(sums[worker])
    transfers = [span for span in out.record.spans if span.activity == "transfer"]
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


def test_ages_of_models_that_are_used_later() -> None:
    out = seconds_of(PushSum(overlap=2), [1.0] * 4, steps=4)  # two of the four exchanges are not used yet
    assert out.record.pulls.tolist() == [2] * 4 and out.record.oldest == pytest.approx(0.02)
    assert out.record.ages.tolist() == pytest.approx([0.04] * 4)


def test_what_hides_communication() -> None:
    gbps, rounds = [1.0] * 4, 6 * 0.002  # less than loading, more than computing
    plain = seconds_of(AllReduce(), gbps, steps=4, load=0.02)
    assert plain.seconds == pytest.approx(4 * (0.03 + rounds))
    layered = seconds_of(Layered(), gbps, steps=4, load=0.02)
    assert layered.seconds == pytest.approx(4 * 0.03) and not layered.record.waiting.any()
    layered = seconds_of(Layered(), gbps, steps=4, load=0.004)
    assert layered.seconds == pytest.approx(4 * (0.01 + rounds))
    assert layered.record.waiting.tolist() == pytest.approx([4 * (rounds - 0.004)] * 4)
    for load, waits in ((0.02, 0.0), (0.004, 0.002)):  # loading hides only the messages with parameters
        local = seconds_of(LocalSGD(group_size=4, overlap=True), gbps, steps=4, load=load)
        assert local.seconds == pytest.approx(4 * (0.01 + 0.006 + load + waits))
        assert local.record.waiting.tolist() == pytest.approx([4 * (0.006 + waits)] * 4)
    late = seconds_of(AllReduce(double_buffering=True), gbps, steps=4)
    assert late.seconds == pytest.approx(0.02 + 0.002 + 0.012 + 0.012)  # reductions follow each other
    push = seconds_of(PushSum(), gbps, steps=4)
    assert push.seconds == pytest.approx(4 * (0.018 + 64e-9))
    for overlap in (1, 2):
        push = seconds_of(PushSum(overlap=overlap), gbps, steps=4)
        assert push.seconds == pytest.approx(4 * 0.01) and not push.record.waiting.any()
    for outer_step, waits in ((0, rounds), (1, rounds - 0.01), (2, 0.0)):
        diloco = seconds_of(DiLoCo(interval=4, overlap=outer_step), gbps, steps=7)
        assert diloco.seconds == pytest.approx(7 * 0.01 + waits)
        assert diloco.record.waiting.tolist() == pytest.approx([waits] * 4)
    grouped = seconds_of(DiLoCo(interval=4, overlap=1, group_size=2), gbps, steps=4)
    # Each step reduces in groups of two: 2 rounds of half of the bytes. No worker waits for the outer step.
    assert grouped.seconds == pytest.approx(4 * (0.01 + 2 * 0.004))
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
