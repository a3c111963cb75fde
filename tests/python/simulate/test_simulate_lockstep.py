"""The simulator's lock-step engine: the problem without data, and numerics against the real optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from lockstep_cases import CHOICES, MIXES, WORKERS, job_of, really_trained, silent

import sordino.torch as hvd
from sordino import sim
from sordino._core import (
    Dissemination,
    Exponential,
    Grouped,
    RandomCycle,
    RandomGroups,
    RandomPull,
    Ring,
    Roulette,
    Star,
)
from sordino.algorithms import (
    AllReduce,
    CaPS,
)
from sordino.simulate import lockstep
from sordino.simulate.images import Images
from sordino.simulate.images import Trainee as ImagesTrainee
from sordino.simulate.quadratic import Quadratic
from sordino.simulate.traffic import Rows
from sordino.simulate.vectorized import numerics_of

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
            apart.gradient([worker])
            if worker == 5:
                twin.grad = apart.kept_gradient(5).clone()
            apart.step([worker])
        sgd.step()
    assert np.array_equal(together.parameters, apart.parameters)
    torch.testing.assert_close(apart.values(5), twin.detach())


def test_workers_that_step_together_or_alone_by_turns_step_as_among_all() -> None:
    job = job_of(AllReduce(), workers=40, momentum=0.9, lr=0.1, dimension=5)
    together, turns = Quadratic(job), Quadratic(job)
    everybody = np.random.default_rng(1).permutation(40).tolist()
    for step in range(40):
        together.move(together.gradients())
        parts = [everybody[begin : begin + 20] for begin in (0, 20)] if step % 19 else [[one] for one in everybody]
        for part in parts:
            turns.gradient(part)
            turns.step(part)
    assert np.array_equal(together.parameters, turns.parameters)


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
    numerics = numerics_of(job.algorithm, problem)
    for step, (values, really_sent) in enumerate(zip(wanted, skipped)):
        sent = numerics.step(step)
        np.testing.assert_allclose(problem.parameters, values, atol=3e-6)
        if isinstance(job.algorithm, CaPS):
            assert sent is not None and really_sent is not None and np.array_equal(sent, really_sent)
    if choice.startswith("caps-") and choice != "caps-server":
        assert not all(one.all() for one in skipped if one is not None)  # something was skipped


@pytest.mark.parametrize("choice", ("allreduce", "crossover", "push-sum-overlap", "layered", "caps"))
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
    """Yield all workers' parameters, float64 [workers, dimension], after each step with a learning rate of 0."""
    algorithm = CHOICES[choice]
    job = job_of(algorithm, workers=workers, lr=0.0)
    problem = Quadratic(job)
    problem.parameters[:] = np.random.default_rng(workers).normal(size=problem.parameters.shape)
    numerics = numerics_of(algorithm, problem)
    for round in range(rounds):
        numerics.step(round)
        yield problem.parameters.astype(np.float64)


@pytest.mark.parametrize("workers", (2, 5, 64, 1000))
@pytest.mark.parametrize("choice", [choice for choice in MIXES if choice != "crossover-roulette"])
def test_mixing_keeps_the_mean_and_brings_workers_together(choice: str, workers: int) -> None:
    if choice == "push-sum-two" and workers == 2:
        return  # a worker has only one peer
    values = list(exchanged(choice, workers, 12))
    start = np.random.default_rng(workers).normal(size=values[0].shape).mean(axis=0)
    for now in values:
        np.testing.assert_allclose(now.mean(axis=0), start, atol=1e-6)
    spread = [float(now.std(axis=0).mean()) for now in values]
    assert spread[-1] < (0.7 if choice.startswith("dpsgd") else 0.5) * max(spread[0], 1e-6)  # a ring is slow


def test_allreduce_keeps_workers_equal() -> None:
    problem_of = Quadratic(job_of(AllReduce(), workers=50, lr=0.1))
    numerics = numerics_of(AllReduce(), problem_of)
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
        RandomGroups(size, 5, 2),
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
