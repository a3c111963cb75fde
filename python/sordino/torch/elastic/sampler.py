"""Sampler whose epoch continues after a fault: the rest of the epoch is divided again among the remaining ranks.

A division gives every rank a list of equal length. Each rank notes which spans of its list it has processed, and ranks
exchange these notes in a commit. So every rank knows the notes of all ranks, also of ranks that are lost later.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sordino.errors import UsageError
from sordino.runtime.context import current
from sordino.runtime.devices import HOST

Spans = list[tuple[int, int]]  # disjoint [begin, end) in ascending order


@dataclass(frozen=True)
class _Division:
    """Rest of an epoch, divided into the ranks' lists: rank r has dealt[r], dealt[r + ranks], ..."""

    epoch: int
    done: torch.Tensor  # bool by index: processed before this division
    left: torch.Tensor  # int64, in the order in which indices are dealt
    dealt: torch.Tensor  # `left`, with its beginning repeated until all ranks have the same number
    ranks: int
    rank: int  # this rank

    def list_of(self, rank: int) -> torch.Tensor:
        return self.dealt[rank :: self.ranks]

    @cached_property
    def places(self) -> dict[int, int]:
        """Place of each index in this rank's list."""
        return {index: place for place, index in enumerate(self.list_of(self.rank).tolist())}

    @property
    def mark(self) -> list[int]:
        """Identification of the division. Each division of an epoch has fewer indices left than the previous one."""
        return [self.epoch, self.ranks, len(self.left)]


Memento = tuple[_Division, dict[int, Spans]]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler that divides a dataset among the ranks, and the rest of it again when ranks are lost.

    Give it to the `DataLoader` and, under any name, to `TorchState`, and call `record_batch` after each batch.
    `state.commit()` tells all ranks what each has processed. After a fault, the indices of this epoch that were in no
    committed batch are divided among the current ranks. Each is visited once, except a few that are repeated so that
    all ranks have the same number.

    Args:
        dataset: a dataset of constant length, the same on all ranks.
        shuffle: whether each epoch has a random order.
        seed: seed of that order, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with no index processed.

        Call it at the end of the previous epoch. Otherwise a fault would repeat what that epoch had processed.
        """
        context = current()
        self._divide(epoch, torch.zeros(len(self.dataset), dtype=torch.bool, device=HOST), context.rank, context.size)

    def reset(self) -> None:
        """Divide the rest, as far as this rank knows it, among the current ranks.

        `TorchState` calls it on all ranks after a fault, when all ranks know the same.
        """
        context = current()
        self._divide(self.epoch, self._processed(), context.rank, context.size)

    def _divide(self, epoch: int, done: torch.Tensor, rank: int, size: int) -> None:
        order = self._order(epoch, len(done))
        left = order[~done[order]]
        total = -(-len(left) // size) * size
        # Fewer indices may be left than there are ranks, so the beginning may be repeated several times.
        dealt = left[torch.arange(total, device=HOST) % max(1, len(left))]
        self._division = _Division(epoch, done, left, dealt, size, rank)
        self._taken: dict[int, Spans] = {}  # processed spans of each rank's list, as far as this rank knows

    def _order(self, epoch: int, length: int) -> torch.Tensor:
        """Return the order of an epoch, the same as Horovod's, so that `processed_num` in its checkpoints fits."""
        order = list(range(length))
        if self.shuffle:
            random.Random(self.seed + epoch).shuffle(order)
        return torch.tensor(order, dtype=torch.int64, device=HOST)

    @property
    def epoch(self) -> int:
        """Number of the epoch, as given to `set_epoch`."""
        return self._division.epoch

    @property
    def num_replicas(self) -> int:
        """Number of ranks among which the epoch was divided."""
        return self._division.ranks

    @property
    def rank(self) -> int:
        """Number of this rank among them."""
        return self._division.rank

    # ---- used by the loader ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        return iter(self._division.list_of(self.rank).tolist())

    def __len__(self) -> int:
        return len(self._division.dealt) // self.num_replicas

    @property
    def num_samples(self) -> int:
        """Number of indices that each rank visits."""
        return len(self)

    @property
    def total_size(self) -> int:
        """Number of indices that all ranks visit together, including repetitions."""
        return len(self._division.dealt)

    # ---- processed indices -------------------------------------------------------------------------------------

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of a batch of this rank. The last batch may be smaller.

        Args:
            batch_idx: number of the batch since the last start of an iteration over the loader, from 0.
            batch_size: size of all batches on this rank.

        Raises:
            UsageError: there is no such batch.
        """
        begin, end = self._span(batch_idx, batch_size)
        indices: list[int] = self._division.list_of(self.rank)[begin:end].tolist()
        return indices

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that this rank has processed a batch. The arguments are those of `get_indices`.

        A batch beyond the last one stands for the next samples that are not noted yet, because scripts may continue
        their count when they start a new iteration over the loader.
        """
        own = self._taken.setdefault(self.rank, [])
        if batch_idx >= 0 and batch_size >= 1 and batch_idx * batch_size >= len(self):
            spans = _first_free(own, batch_size, len(self))
        else:
            spans = [self._span(batch_idx, batch_size)]
        for span in spans:
            _add(own, *span)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that this rank has processed these indices. Raises UsageError for an index of another rank's list."""
        wanted, places = [int(index) for index in indices], self._division.places
        for index in wanted:
            if index not in places:
                raise UsageError(f"record_indices(): index {index} does not belong to rank {self.rank}")
        for place in sorted(places[index] for index in wanted):
            _add(self._taken.setdefault(self.rank, []), place, place + 1)

    def _span(self, batch_idx: int, batch_size: int) -> tuple[int, int]:
        begin = batch_idx * batch_size
        if batch_idx < 0 or batch_size < 1 or begin >= len(self):
            raise UsageError(
                f"there is no batch {batch_idx} of {batch_size} among the {len(self)} samples of this rank: batches "
                "count from 0 in each iteration over the loader"
            )
        return begin, min(begin + batch_size, len(self))

    @property
    def processed_indices(self) -> set[int]:
        """Processed indices of this epoch: those of this rank, and those of all ranks at the last commit."""
        return set(self._processed().nonzero().flatten().tolist())

    @property
    def processed_num(self) -> int:
        """Number of processed samples of this epoch, by Horovod's count.

        It assumes that since the last division each rank has processed as many samples as this one.
        """
        own = sum(end - begin for begin, end in self._taken.get(self.rank, []))
        done = self._division.done
        return min(int(done.sum()) + own * self.num_replicas, len(done))

    @property
    def remaining_indices(self) -> list[int]:
        """Indices that were left of this epoch at the last division, in the order of visits."""
        indices: list[int] = self._division.left.tolist()
        return indices

    def _processed(self) -> torch.Tensor:
        """Return which indices are processed, bool by index."""
        done = self._division.done.clone()
        for rank, spans in self._taken.items():
            for begin, end in spans:
                done[self._division.list_of(rank)[begin:end]] = True
        return done

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and its processed indices. After a commit this is right for all ranks.

        Horovod's sampler can load it.
        """
        processed = self._processed().nonzero().flatten()
        return {"epoch": self.epoch, "processed_num": self.processed_num, "processed_indices": processed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue in an epoch. Its rest is divided among the current ranks.

        A state of Horovod's sampler has no indices: then the first `processed_num` of the epoch are processed. Raises
        UsageError for indices that the dataset does not have, or if the state is not one of a sampler.
        """
        context = current()
        self.divide_rest_of(state_dict, context.rank, context.size)

    def divide_rest_of(self, state_dict: Mapping[str, Any], rank: int, size: int) -> None:
        """Load a state like `load_state_dict`, with the rank and number of ranks that all ranks have agreed on."""
        lacks = [name for name in ("epoch", "processed_indices") if name not in state_dict]
        if "processed_num" in state_dict and lacks == ["processed_indices"]:
            first = self._order(state_dict["epoch"], len(self.dataset))[: max(0, state_dict["processed_num"])]
            state_dict, lacks = {**state_dict, "processed_indices": first}, []
        if lacks:
            raise UsageError(f"this is not a state of ElasticSampler: it lacks {', '.join(lacks)}")
        done = torch.zeros(len(self.dataset), dtype=torch.bool, device=HOST)
        processed = state_dict["processed_indices"]
        indices = (
            processed
            if isinstance(processed, torch.Tensor)
            else torch.tensor(list(processed), dtype=torch.int64, device=HOST)
        )
        if len(indices) > 0 and not 0 <= int(indices.min()) <= int(indices.max()) < len(done):
            raise UsageError(
                f"this state of ElasticSampler has indices beyond the dataset of {len(done)} samples: use the same "
                "dataset"
            )
        done[indices] = True
        self._divide(state_dict["epoch"], done, rank, size)

    # ---- used by TorchState ------------------------------------------------------------------------------------

    def memento(self) -> Memento:
        """Return a memento for `revert`: the division itself, and copies of the notes."""
        return self._division, {rank: list(spans) for rank, spans in self._taken.items()}

    def revert(self, memento: Memento) -> None:
        """Go back without a new division, because ranks must still exchange what they have processed."""
        self._division, taken = memento
        self._taken = {rank: list(spans) for rank, spans in taken.items()}

    def notes(self) -> list[int]:
        """Return this rank's processed spans of its list, for the other ranks."""
        own = self._taken.get(self.rank, [])
        return [*self._division.mark, self.rank, *itertools.chain.from_iterable(own)]

    def hear(self, notes: Sequence[int]) -> bool:
        """Take a rank's notes. Return False if they refer to another division than this rank's."""
        mark, rank, spans = list(notes[:3]), notes[3], notes[4:]
        if mark != self._division.mark:
            return False
        self._taken[rank] = list(zip(spans[::2], spans[1::2]))
        return True


def _add(spans: Spans, begin: int, end: int) -> None:
    """Add a span, and join it with spans that it touches."""
    apart = [span for span in spans if span[1] < begin or span[0] > end]
    touching = [span for span in spans if span[1] >= begin and span[0] <= end]
    begin = min([begin, *(span[0] for span in touching)])
    end = max([end, *(span[1] for span in touching)])
    spans[:] = sorted([*apart, (begin, end)])


def _first_free(spans: Spans, count: int, length: int) -> Spans:
    """Return the first `count` places of a list that are in no span, as spans."""
    found, begin = [], 0
    for first, end in [*spans, (length, length)]:
        free = min(first - begin, count)
        if free > 0:
            found.append((begin, begin + free))
            count -= free
        begin = end
    return found
