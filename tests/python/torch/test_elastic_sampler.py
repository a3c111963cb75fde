"""`hvd.elastic.ElasticSampler`: whatever ranks are lost, an epoch visits every index, and repeats only the padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sordino import checkpoint, sim
from sordino.errors import UsageError
from sordino.runtime.context import use
from sordino.torch.elastic import ElasticSampler


def samplers(size: int, length: int, epoch: int = 0, **options: object) -> list[ElasticSampler]:
    """Return the samplers of all ranks of a world."""
    made = []
    for context in sim.contexts(size):
        with use(context):
            made.append(ElasticSampler(range(length), **options))
            made[-1].set_epoch(epoch)
    return made


def tell(everybody: Sequence[ElasticSampler]) -> None:
    """Exchange the samplers' notes, as a commit does."""
    notes = [sampler.notes() for sampler in everybody]
    for sampler in everybody:
        for one in notes:
            assert sampler.hear(one)


def divided(size: int, state: dict) -> list[ElasticSampler]:
    """Give one rank's state to all ranks of another world, as a synchronization does."""
    made = samplers(size, 0)
    for rank, sampler in enumerate(made):
        sampler.dataset = range(state["length"])
        sampler.divide_rest_of(state, rank, size)
    return made


lengths = st.integers(0, 60)
sizes = st.integers(1, 6)


@st.composite
def stretches(draw) -> tuple[int, list[int], list[int]]:
    """Draw the time until a fault: the number of ranks, and for each its batches at the last commit and after it."""
    size = draw(sizes)
    batches = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    return size, draw(batches), draw(batches)


@given(lengths, st.integers(1, 7), st.lists(stretches(), max_size=4), sizes, st.booleans(), st.integers(0, 5))
def test_all_is_visited_and_only_the_padding_twice(length, batch, faults, last, shuffle, epoch) -> None:
    """Ranks at different speeds, worlds that shrink and grow, with the state of any rank after the fault."""
    committed: Counter[int] = Counter()
    padding = 0
    state = {"epoch": epoch, "processed_indices": torch.empty(0, dtype=torch.int64), "length": length}
    for size, batches, more in [*faults, (last, None, None)]:
        everybody = divided(size, state)
        for sampler in everybody:
            sampler.shuffle = shuffle
            sampler.divide_rest_of(state, sampler.rank, size)
        assert len({len(sampler) for sampler in everybody}) == 1
        assert all(len(list(sampler)) == len(sampler) == sampler.num_samples for sampler in everybody)
        padding += everybody[0].total_size - len(everybody[0].remaining_indices)
        assert 0 <= everybody[0].total_size - len(everybody[0].remaining_indices) < size
        full = -(-len(everybody[0]) // batch)
        for sampler, wanted in zip(everybody, batches or [full] * size):
            for number in range(min(wanted, full)):
                committed.update(sampler.get_indices(number, batch))
                sampler.record_batch(number, batch)
        tell(everybody)
        mementos = [sampler.memento() for sampler in everybody]
        for sampler, had, wanted in zip(everybody, batches or (), more or ()):
            for number in range(min(had, full), min(had + wanted, full)):
                sampler.record_batch(number, batch)
        for sampler, memento in zip(everybody, mementos):
            sampler.revert(memento)
        knowledge = {frozenset(sampler.processed_indices) for sampler in everybody}
        assert knowledge == {frozenset(committed)}  # also of lost ranks
        state = {**everybody[-1].state_dict(), "length": length}
    assert set(committed) == set(range(length))
    assert sum(committed.values()) - length <= padding


@given(lengths, sizes, st.integers(1, 7), st.integers(0, 9))
def test_ranks_divide_an_epoch(length, size, batch, epoch) -> None:
    everybody = samplers(size, length, epoch, seed=3)
    dealt = Counter(index for sampler in everybody for index in sampler)
    assert set(dealt) == set(range(length))
    assert sum(dealt.values()) == everybody[0].total_size < length + size
    assert max(dealt.values(), default=1) - min(dealt.values(), default=1) <= 1
    mine = list(everybody[-1])
    got = [everybody[-1].get_indices(number, batch) for number in range(-(-len(mine) // batch))]
    assert [index for indices in got for index in indices] == mine


def test_the_order_is_the_seeds_and_the_epochs() -> None:
    def order(seed: int, epoch: int, shuffle: bool = True) -> list[int]:
        return list(samplers(1, 50, epoch, seed=seed, shuffle=shuffle)[0])

    assert order(1, 0) == order(1, 0) != order(1, 1) != order(3, 0)
    assert order(1, 0, False) == order(2, 5, False) == list(range(50))


@given(st.lists(st.integers(0, 9), max_size=8))
def test_notes_of_batches_in_any_order(numbers) -> None:
    by_batch, by_index = samplers(2, 37)[1], samplers(2, 37)[1]
    for number in numbers:
        if number * 2 < len(by_batch):
            by_batch.record_batch(number, 2)
            by_index.record_indices(by_index.get_indices(number, 2))
    wanted = {index for number in numbers if number * 2 < 19 for index in by_batch.get_indices(number, 2)}
    assert by_batch.processed_indices == by_index.processed_indices == wanted
    assert by_batch.notes() == by_index.notes()


def test_set_epoch_forgets_and_reset_does_not() -> None:
    sampler = samplers(2, 10)[0]
    sampler.record_batch(0, 3)
    before = sampler.processed_indices
    assert len(before) == 3
    with use(sim.contexts(3)[2]):
        sampler.reset()
    assert (sampler.rank, sampler.num_replicas, sampler.processed_indices) == (2, 3, before)
    assert set(sampler.remaining_indices) == set(range(10)) - before
    with use(sim.contexts(1)[0]):
        sampler.set_epoch(1)
        assert (sampler.epoch, sampler.processed_indices, len(sampler)) == (1, set(), 10)


def test_state_goes_through_a_checkpoint(tmp_path) -> None:
    first, second = samplers(1, 10, epoch=4)[0], samplers(1, 10)[0]
    first.record_batch(1, 3)
    checkpoint.save(tmp_path / "file", first.state_dict())
    with use(sim.contexts(1)[0]):
        second.load_state_dict(checkpoint.load(tmp_path / "file"))
        assert (second.epoch, second.processed_indices) == (4, first.processed_indices)
        assert list(second) == [index for index in first if index not in first.processed_indices]
        second.load_state_dict({"epoch": 4, "processed_indices": {1, 2}})
        assert second.processed_indices == {1, 2}


def test_what_was_kept_can_be_gone_back_to_more_than_once() -> None:
    sampler = samplers(1, 10)[0]
    sampler.record_batch(0, 2)
    kept, then = sampler.memento(), sampler.processed_indices
    for _ in range(2):
        sampler.record_batch(1, 2)
        assert len(sampler.processed_indices) == 4
        sampler.revert(kept)
        assert sampler.processed_indices == then


def test_it_counts_as_horovods_does() -> None:
    """Every rank counts as having done as many batches as this one; no sample of the padding counts twice."""
    sampler = samplers(3, 10)[1]
    for number, wanted in enumerate([6, 10]):
        sampler.record_batch(number, 2)
        assert sampler.processed_num == sampler.state_dict()["processed_num"] == wanted
    with use(sim.contexts(3)[1]):
        sampler.set_epoch(1)
    assert sampler.processed_num == 0


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 4))
def test_batches_beyond_the_last_are_the_next_ones(numbers, batch) -> None:
    """Some scripts continue to count after a reset. Horovod only counts, so it allows that."""
    sampler = samplers(2, 37)[1]
    mine = list(sampler)
    for number in numbers:
        sampler.record_batch(number, batch)
    noted = sampler.processed_indices
    sampler.record_batch(100, batch)
    next_ones = [index for index in mine if index not in noted][:batch]
    assert sampler.processed_indices == noted | set(next_ones)
    for number in range(101, 130):
        sampler.record_batch(number, batch)
    assert sampler.processed_indices == set(mine) and sampler.processed_num == 37


@pytest.mark.parametrize(("shuffle", "first"), [(False, [0, 1, 2]), (True, [1, 5, 6])])
def test_a_state_of_horovods_goes_on(shuffle, first) -> None:
    """The order is that of Python's random module, which will always give the same numbers."""
    with use(sim.contexts(1)[0]):
        sampler = ElasticSampler(range(10), shuffle=shuffle, seed=1)
        for count in (-1, 3, 99):
            sampler.load_state_dict({"epoch": 2, "processed_num": count})
            assert sampler.epoch == 2 and sampler.processed_num == min(max(count, 0), 10)
            if count == 3:
                assert sampler.processed_indices == set(first)


def test_notes_of_another_division_are_not_taken() -> None:
    first, second = samplers(2, 10)
    second.record_batch(0, 2)
    with use(sim.contexts(2)[0]):
        first.set_epoch(1)
    assert not first.hear(second.notes())
    assert first.processed_indices == set()


def test_misuse_is_told() -> None:
    sampler = samplers(2, 10)[0]
    for arguments in [(-1, 2), (0, 0)]:
        with pytest.raises(UsageError, match="there is no batch"):
            sampler.record_batch(*arguments)
    with pytest.raises(UsageError, match="there is no batch 3 of 2 among the 5 samples"):
        sampler.get_indices(3, 2)
    sampler.record_batch(2, 2)  # a batch of one, the last
    other = next(iter(set(range(10)) - set(sampler)))
    with pytest.raises(UsageError, match=f"index {other} does not belong to rank 0"):
        sampler.record_indices([other])
    with use(sim.contexts(1)[0]):
        with pytest.raises(UsageError, match="lacks processed_indices"):
            sampler.load_state_dict({"epoch": 1})
        for indices in ([10], [-1]):
            with pytest.raises(UsageError, match="beyond the dataset of 10"):
                sampler.load_state_dict({"epoch": 1, "processed_indices": indices})
