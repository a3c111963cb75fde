"""States of `hvd.elastic`: saved, restored, and made equal on all ranks."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from elastic_jobs import Job, Killed, Seat, wrapped
from elastic_models import Values, adam, equal, model_of, sgd, take_step, values

import sordino.torch as hvd
from sordino import sim
from sordino.codecs import Sign
from sordino.errors import UsageError
from sordino.runtime.context import current
from sordino.torch.elastic import ElasticSampler, ObjectState, TorchState
from sordino.torch.elastic.snapshot import Snapshot

SIZES = [1, 2, 3, 5]


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_TIMEOUT_S", "60")


@pytest.mark.parametrize("size", SIZES)
def test_all_start_as_rank_0(size) -> None:
    def work() -> tuple[Values, list[Any]]:
        rank = hvd.rank()
        model = model_of(rank)
        optimizer = adam(model)
        state = TorchState(model, optimizer, sampler=ElasticSampler(range(20)), epoch=rank, tags={"a": [rank]})
        if rank == 0:
            take_step(state, 0)  # the other ranks' optimizers have no state
            state.sampler.load_state_dict({"epoch": 3, "processed_indices": [1, 2]})
        state.sync()
        moment = [entry["exp_avg"].clone() for entry in optimizer.state_dict()["state"].values()]
        state.tags["a"].append("changed")
        state.restore()
        sampler = state.sampler
        return values(model) + moment, [state.epoch, state.tags, sampler.epoch, sampler.processed_indices, len(sampler)]

    results = sim.run(size, work)
    assert len(results[0][0]) > len(values(model_of(0)))
    for mine, plain in results:
        assert equal(mine, results[0][0])
        assert plain == [0, {"a": [0]}, 3, {1, 2}, -(-18 // size)]


def test_tensors_that_the_core_cannot_send_are_in_the_state() -> None:
    def work() -> tuple[Values, list[float]]:
        model = torch.nn.Linear(2, 1, dtype=torch.complex64)
        torch.nn.init.constant_(model.weight, complex(1, hvd.rank()))
        state = TorchState(model, scale=torch.full((2,), 1.0 + hvd.rank()).to(torch.float8_e4m3fn))
        state.sync()
        model.weight.data.zero_()
        state.restore()
        return [model.weight.detach()], state.scale.float().tolist()

    for weights, scale in sim.run(2, work):
        assert weights[0].tolist() == [[1 + 0j, 1 + 0j]] and scale == [1, 1]


@pytest.mark.parametrize(("algorithm", "own"), [("allreduce", False), ("layered", False), ("crossover", True)])
def test_models_that_differ_stay(algorithm, own) -> None:
    """Buffers differ in any case. If ranks share a model, buffers become the first rank's."""

    def work() -> tuple[bool, bool, int]:
        model = model_of(hvd.rank())
        named = list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(adam(model), named_parameters=named, algorithm=algorithm)
        average = copy.deepcopy(model)
        state = TorchState(model, optimizer, average=average, loss=0)
        state.sync()
        for number in range(3):
            take_step(state, number)
        state.loss = hvd.rank() + 5
        before, moments = values(model), [v["exp_avg"].clone() for v in optimizer.state_dict()["state"].values()]
        state.commit()
        state.sync()
        after = [v["exp_avg"] for v in optimizer.state_dict()["state"].values()]
        return equal(values(model), before), equal(after, moments), state.loss

    results = sim.run(3, work)
    assert [loss for *_, loss in results] == [5] * 3
    assert [model for model, *_ in results] == [True] + [own] * 2
    assert all(moments for _, moments, _ in results)  # with an all-reduce they are equal anyway


@pytest.mark.parametrize("algorithm", ["allreduce", "crossover"])
def test_a_late_rank_takes_the_others_state(algorithm) -> None:
    """This also holds if the late rank is rank 0, and if models differ."""

    def begin() -> TorchState:
        model = model_of(hvd.rank())
        state = TorchState(model, adam(model), epoch=3, sampler=ElasticSampler(range(10)))
        state.sync()
        state.sampler.record_batch(0, 2)
        for parameter in model.parameters():
            parameter.data += hvd.rank()  # as if each had trained a model of its own
        state.commit()
        return state

    def go_on() -> tuple[Values, int, int, int, float]:
        rank = hvd.rank()
        model = model_of(9) if rank == 0 else old[rank - 1].model
        named = list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(adam(model), named_parameters=named, algorithm=algorithm)
        state = TorchState(model, optimizer, epoch=0, sampler=ElasticSampler(range(10))) if rank == 0 else old[rank - 1]
        state.optimizer = optimizer
        state.sync()
        then = values(model)
        model[0].weight.data += rank
        state.sync()  # no longer late
        sampler = state.sampler
        plain = state.epoch, len(sampler.processed_indices), len(sampler)
        return then, *plain, (values(model)[0] - then[0]).mean().item()

    old = sim.run(2, begin)
    wanted = [values(state.model) for state in old]
    results = sim.run(3, go_on)
    assert [plain for _, *plain, _ in results] == [[3, 4, 2]] * 3
    moved = [rank if algorithm == "crossover" else 0 for rank in range(3)]
    assert [change for *_, change in results] == pytest.approx(moved)
    assert equal(results[0][0], wanted[0]) and equal(results[1][0], wanted[0])
    assert equal(results[2][0], wanted[1 if algorithm == "crossover" else 0])


def test_two_models_of_two_process_sets() -> None:
    """Each set takes the model of its own first rank; both sets do it at once."""

    def work() -> Values:
        rank = hvd.rank()
        sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
        model = model_of(rank)
        named = list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(adam(model), named_parameters=named, process_set=sets[rank // 2])
        state = TorchState(model, optimizer)
        state.sync()
        return values(model)

    assert [equal(mine, values(model_of(first))) for mine, first in zip(sim.run(4, work), [0, 0, 2, 2])] == [True] * 4


def in_one_world(work: Callable[[], None]) -> Callable[[], None]:
    def test() -> None:
        sim.run(1, work)

    test.__name__ = work.__name__
    return test


@in_one_world
def test_restoring_takes_everything_back_again_and_again() -> None:
    model = model_of(1)
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TorchState(model, optimizer, scaler=scaler, scheduler=scheduler, seen={"rows": [1]}, note=None)
    take_step(state, 0)
    state.commit()
    then, saved = values(model), copy.deepcopy(optimizer.state_dict())
    for number in range(2):
        take_step(state, number + 1)
        scheduler.step()
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
        state.seen["rows"].append(number)
        state.note = "later"
        state.restore()
        assert equal(values(model), then)
        now = optimizer.state_dict()
        assert now["param_groups"] == saved["param_groups"]
        for index, entry in saved["state"].items():
            assert all(torch.equal(now["state"][index][key], value) for key, value in entry.items())
        assert (scheduler.last_epoch, scaler.get_scale(), state.seen, state.note) == (0, 8.0, {"rows": [1]}, None)


@in_one_world
def test_what_takes_a_models_place_is_saved_at_once() -> None:
    state = TorchState(model_of(1), steps=0)
    state.model = model_of(2)
    state.model[0].weight.data.zero_()
    state.restore()
    assert equal(values(state.model), values(model_of(2)))
    state.model = None
    state.steps = 4
    state.restore()
    assert state.model is None and state.steps == 0


@in_one_world
def test_misuse_of_states_is_told() -> None:
    for name in ("commit", "_version"):
        with pytest.raises(UsageError, match=rf"TorchState\({name}=...\): the state uses this name itself"):
            TorchState(**{name: 1})
    with pytest.raises(UsageError, match=r"ObjectState\(lock=...\): a lock cannot be copied"):
        ObjectState(lock=threading.Lock())


def test_a_rank_in_another_epoch_is_told() -> None:
    def work() -> None:
        state = TorchState(sampler=ElasticSampler(range(8)))
        state.sync()
        state.sampler.set_epoch(hvd.rank())
        with pytest.raises(UsageError, match=r"rank [01] is in another epoch than this rank"):
            state.commit()

    sim.run(2, work)


# ---- snapshots -----------------------------------------------------------------------------------------------------


def test_a_snapshot_keeps_its_memory() -> None:
    tree = {"a": torch.arange(3.0), "b": [torch.ones(2, 2).t(), (torch.tensor(1), "text")], 3: {"x": {1, 2}}}
    snapshot = Snapshot()
    snapshot.take(tree)
    places = [tensor.data_ptr() for tensor in snapshot._tensors]
    tree["a"].fill_(7)
    tree["b"][0].fill_(8)
    assert snapshot.tree()["a"].tolist() == [0, 1, 2]
    snapshot.take(tree)
    assert [tensor.data_ptr() for tensor in snapshot._tensors] == places
    got = snapshot.tree()
    assert got["a"].tolist() == [7] * 3 and got["b"][0].tolist() == [[8, 8], [8, 8]]
    assert got["b"][1] == (torch.tensor(1), "text") and got[3] == {"x": {1, 2}}
    got["a"].zero_()
    got[3]["x"].add(5)
    assert snapshot.tree()["a"].tolist() == [7] * 3 and snapshot.tree()[3] == {"x": {1, 2}}
    assert snapshot.tree(own_tensors=False)["a"].data_ptr() == places[0]


def test_a_snapshot_that_cannot_be_taken_stays() -> None:
    snapshot = Snapshot()
    snapshot.take({"a": torch.zeros(2)})
    with pytest.raises(TypeError):
        snapshot.take({"a": torch.ones(2), "b": threading.Lock()})
    assert snapshot.tree()["a"].tolist() == [0, 0]


def test_a_snapshot_follows_other_shapes_and_keeps_what_a_state_dict_has_beside_its_entries() -> None:
    snapshot = Snapshot()
    for dtype, length in [(torch.float32, 3), (torch.float32, 4), (torch.float64, 4), (torch.bfloat16, 0)]:
        snapshot.take([torch.full((length,), 2, dtype=dtype)])
        assert torch.equal(snapshot.tree()[0], torch.full((length,), 2, dtype=dtype))
    state = model_of(0).state_dict()
    snapshot.take(state)
    assert snapshot.tree()._metadata == state._metadata


@pytest.mark.parametrize("size", SIZES)
def test_a_sampler_goes_back_to_the_last_commit(size: int) -> None:
    def work() -> tuple[set[int], set[int]]:
        state = TorchState(sampler=ElasticSampler(range(20)))
        state.sync()
        state.sampler.record_batch(0, 2)
        state.commit()
        committed = state.sampler.processed_indices
        state.sampler.record_batch(1, 2)
        assert state.sampler.processed_indices > committed
        state.restore()
        return committed, state.sampler.processed_indices

    for committed, restored in sim.run(size, work):
        assert restored == committed and len(committed) == 2 * size


def test_residuals_stay_with_their_ranks_after_a_loss() -> None:
    """The remaining ranks have other numbers then, and owe the same to the mean of fewer ranks (residuals.py)."""
    before: dict[int, tuple[list[torch.Tensor], int]] = {}
    after: dict[int, list[torch.Tensor]] = {}

    def residuals(optimizer: hvd.DistributedOptimizer) -> list[torch.Tensor]:
        (own,) = optimizer.state_dict()["sordino"]["gradient_residuals"]["by_rank"].values()
        return [one for mean in own["means"] for one in mean["residuals"]]

    def work() -> None:
        seat = current()
        assert isinstance(seat, Seat)
        model = model_of(0)
        optimizer = wrapped(sgd(model), named_parameters=model.named_parameters(), compression=Sign(32))

        @hvd.elastic.run
        def train(state: TorchState) -> None:
            if hvd.size() == 3:
                for number in range(3):
                    take_step(state, number)
                state.commit()
                before[seat.number] = residuals(optimizer), seat.rank
                hvd.barrier()
                if seat.number == 0:
                    raise Killed
                hvd.barrier()
            after[seat.number] = residuals(optimizer)

        train(TorchState(model, optimizer))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Job(3, work).run()
    assert sorted(after) == [1, 2]
    for number, (found,) in after.items():
        (owed, shard), place = before[number]
        wanted = owed.clone()
        part = wanted[place * len(shard) : (place + 1) * len(shard)]
        part += 3 * shard[: len(part)]
        count = sum(one.numel() for one in model_of(0).parameters())  # the rest is padding
        assert wanted[:count].any() and torch.allclose(found[:count], wanted[:count] * 2 / 3)
