"""The parts of `horovod.torch.elastic` that scripts extend: handlers, user functions, news of hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from elastic_models import equal, model_of, values

import sordino.torch as hvd
from sordino import sim
from sordino.torch.elastic import ElasticSampler, ObjectState, TorchState, run_fn
from sordino.torch.elastic import state as states

SIZES = [1, 2, 3]


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_TIMEOUT_S", "60")


# ---- handlers --------------------------------------------------------------------------------------------------------


class Counter:
    """A value that is no module and has no state_dict."""

    def __init__(self, count: int) -> None:
        self.count = count


class CounterHandler(states.StateHandler):
    def __init__(self, value: Counter) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self.saved = self.value.count

    def restore(self) -> None:
        self.value.count = self.saved

    def sync(self) -> None:
        self.value.count = hvd.broadcast_object(self.value.count, 0, name="count")


@pytest.fixture
def registered() -> Iterator[None]:
    before = states.get_handler_registry()
    states.set_handler_registry([*before, (Counter, CounterHandler)])
    yield
    states.set_handler_registry(before)


@pytest.mark.parametrize("size", SIZES)
def test_a_handler_of_ones_own_takes_care(size: int, registered: None) -> None:
    def work() -> list[int]:
        counter = Counter(10 + hvd.rank())
        state = TorchState(counter=counter, epoch=hvd.rank())
        state.sync()
        seen = [counter.count, state.epoch]
        counter.count = 50
        state.restore()
        seen.append(counter.count)
        counter.count = 60 + hvd.rank()
        state.commit()
        counter.count = 0
        state.restore()
        seen.append(counter.count - hvd.rank())
        other = Counter(70)
        state.counter = other  # saved at once
        other.count = 0
        state.restore()
        return [*seen, other.count, counter.count - hvd.rank()]

    assert sim.run(size, work) == [[10, 0, 10, 60, 70, 60]] * size


def test_without_one_it_is_an_attribute() -> None:
    def work() -> tuple[int, bool]:
        counter = Counter(hvd.rank())
        state = TorchState(counter=counter)
        state.sync()
        return state.counter.count, state.counter is counter

    assert [count for count, _ in sim.run(2, work)] == [0, 0]


@pytest.mark.parametrize("size", SIZES)
def test_horovods_handlers_work_by_themselves(size: int) -> None:
    def work() -> tuple[Any, ...]:
        rank = hvd.rank()
        model = model_of(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
        sampler = ElasticSampler(range(20))
        handlers = [
            states.ModelStateHandler(model),
            states.OptimizerStateHandler(optimizer),
            states.SamplerStateHandler(sampler),
        ]
        for handler in handlers:
            handler.sync()
        synced = values(model)
        model[0].weight.data += 1
        optimizer.param_groups[0]["lr"] = 5.0
        sampler.record_batch(0, 2)
        for handler in handlers:
            handler.restore()
        back = equal(values(model), synced), optimizer.param_groups[0]["lr"], sampler.processed_num
        sampler.record_batch(0, 2)
        handlers[2].sync()
        other = model_of(9)
        handlers[0].set_value(other)
        other[0].weight.data += 1
        handlers[0].restore()
        return synced, back, len(sampler.processed_indices), equal(values(other), values(model_of(9)))

    for synced, *others in sim.run(size, work):
        assert equal(synced, values(model_of(0)))
        assert others == [(True, 0.1, 0), 2 * size, True]


def test_the_base_class_does_nothing() -> None:
    handler = states.StateHandler(1)
    for method in (handler.save, handler.restore, handler.sync):
        with pytest.raises(NotImplementedError, match=rf"StateHandler\.{method.__name__}\(\)"):
            method()


# ---- user functions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_attributes_are_made_equal_by_a_function_of_ones_own(own: bool) -> None:
    def work() -> tuple[Any, ...]:
        calls: list[Any] = []

        def last_ones(value: Any) -> Any:
            calls.append(value)
            return hvd.broadcast_object(value, hvd.size() - 1, name="mine")

        state = ObjectState(
            bcast_object=last_ones if own else hvd.broadcast_object, get_rank=hvd.rank, epoch=hvd.rank()
        )
        state.sync()
        state.epoch += 10
        state.restore()
        return state.epoch, calls, state._rank() == hvd.rank(), "get_rank" in state._parts

    for rank, (epoch, calls, ranked, attribute) in enumerate(sim.run(3, work)):
        assert epoch == (2 if own else 0) and ranked and not attribute
        assert calls == ([{"epoch": rank}] if own else [])


# ---- hosts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("updates", "only_removed"), [({1: 1}, True), ({0: 2}, False), ({0: 1, 2: 2}, False)])
def test_news_of_hosts_interrupt_all_ranks(updates: dict[int, int], only_removed: bool) -> None:
    """News interrupts all ranks once. News that is older than the ranks' knowledge does not interrupt again."""

    def work() -> list[Any]:
        state = ObjectState(step=0)
        seen: list[Any] = []
        state.reset = lambda: seen.append("reset")
        state.register_reset_callbacks([lambda: seen.append("callback")])
        resets = []

        def train(state: ObjectState) -> list[Any]:
            while state.step < 6:
                state.step += 1
                if state.step == 2 and hvd.rank() in updates:
                    state.on_hosts_updated(100.5 + hvd.rank(), updates[hvd.rank()])
                if state.step == 4:
                    state.on_hosts_updated(100.25, 3)
                try:
                    state.check_host_updates()
                except states.HostsUpdatedInterrupt as interrupt:
                    seen.append((state.step, interrupt.skip_sync))
                    raise
            return seen

        result = run_fn(train, lambda: resets.append(len(seen)))(state)
        assert resets == [1]
        return result

    assert sim.run(3, work) == [[(2, only_removed), "reset", "callback"]] * 3


def test_news_are_heard_in_a_commit_too() -> None:
    def work() -> int:
        state = ObjectState(step=0)
        state.on_hosts_updated(1.0, 2)
        state.on_reset()  # forgets them
        state.commit()
        state.on_hosts_updated(1.0, 2)
        state.step = 5
        with pytest.raises(states.HostsUpdatedInterrupt):
            state.commit()
        state.step = 0
        state.restore()
        return state.step

    assert sim.run(2, work) == [5, 5]
