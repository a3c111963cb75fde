"""A sampler whose epoch goes on after a fault: what is left of it is divided anew among the ranks that are left.

A division gives every rank a list of equal length. Ranks note spans of their lists that they have processed and tell
each other, so that every rank knows of all, also of those that are lost later.
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

Spans = list[tuple[int, int]]  # disjoint [begin, end), in order


@dataclass(frozen=True)
class _Division:
    """What was left of an epoch, cut into the ranks' lists: rank r has dealt[r], dealt[r + ranks], ..."""

    epoch: int
    done: torch.Tensor  # bool, by index: processed before
    left: torch.Tensor  # int64, in the order in which indices are dealt
    dealt: torch.Tensor  # `left`, its beginning repeated until all ranks have as many
    ranks: int
    rank: int  # this one

    def list_of(self, rank: int) -> torch.Tensor:
        return self.dealt[rank :: self.ranks]

    @cached_property
    def places(self) -> dict[int, int]:
        """Of the indices in this rank's list."""
        return {index: place for place, index in enumerate(self.list_of(self.rank).tolist())}

    @property
    def mark(self) -> list[int]:
        """Tells it from others: within an epoch ever less is left."""
        return [self.epoch, self.ranks, len(self.left)]


Memento = tuple[_Division, dict[int, Spans]]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides a dataset among the ranks, and what is left of it when ranks are lost.

    Give it to the `DataLoader` and, under any name, to `TorchState`, and call `record_batch` after each batch.
    `state.commit()` tells all ranks what each has processed. After a fault the indices of this epoch that no committed
    batch had are divided among the ranks there are; each is visited once, but for a few that are repeated so that all
    ranks have as many.

    Args:
        dataset: of constant length, the same on all ranks.
        shuffle: whether each epoch has a random order.
        seed: of that order; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with nothing processed.

        Call it at the end of the epoch before, or a fault would repeat what that had already processed.
        """
        context = current()
        self._divide(epoch, torch.zeros(len(self.dataset), dtype=torch.bool, device=HOST), context.rank, context.size)

    def reset(self) -> None:
        """Divide what is left, as far as this rank knows, among the ranks there are.

        `TorchState` does it on all ranks after a fault, when all know the same.
        """
        context = current()
        self._divide(self.epoch, self._processed(), context.rank, context.size)

    def _divide(self, epoch: int, done: torch.Tensor, rank: int, size: int) -> None:
        order = self._order(epoch, len(done))
        left = order[~done[order]]
        total = -(-len(left) // size) * size
        # Fewer may be left than there are ranks: the beginning is repeated as often as it takes.
        dealt = left[torch.arange(total, device=HOST) % max(1, len(left))]
        self._division = _Division(epoch, done, left, dealt, size, rank)
        self._taken: dict[int, Spans] = {}  # of each rank's list, as far as this rank knows

    def _order(self, epoch: int, length: int) -> torch.Tensor:
        """Return the order of an epoch: Horovod's, so that what its checkpoints count is the same here."""
        order = list(range(length))
        if self.shuffle:
            random.Random(self.seed + epoch).shuffle(order)
        return torch.tensor(order, dtype=torch.int64, device=HOST)

    @property
    def epoch(self) -> int:
        """As of `set_epoch`."""
        return self._division.epoch

    @property
    def num_replicas(self) -> int:
        """How many ranks the epoch was divided among."""
        return self._division.ranks

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self._division.rank

    # ---- the loader's side -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        return iter(self._division.list_of(self.rank).tolist())

    def __len__(self) -> int:
        return len(self._division.dealt) // self.num_replicas

    @property
    def num_samples(self) -> int:
        """Indices that each rank visits."""
        return len(self)

    @property
    def total_size(self) -> int:
        """Indices that all ranks together visit, with repetitions."""
        return len(self._division.dealt)

    # ---- what is processed -------------------------------------------------------------------------------------

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of a batch of this rank; the last batch may be smaller.

        Args:
            batch_idx: number of the batch since the loader was last iterated anew, from 0.
            batch_size: of all batches on this rank.

        Raises:
            UsageError: there is no such batch.
        """
        begin, end = self._span(batch_idx, batch_size)
        indices: list[int] = self._division.list_of(self.rank)[begin:end].tolist()
        return indices

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that this rank has processed a batch. Arguments are those of `get_indices`.

        A batch beyond the last one stands for the next samples that are not noted: scripts may count on when the loader
        is iterated anew.
        """
        own = self._taken.setdefault(self.rank, [])
        if batch_idx >= 0 and batch_size >= 1 and batch_idx * batch_size >= len(self):
            spans = _first_free(own, batch_size, len(self))
        else:
            spans = [self._span(batch_idx, batch_size)]
        for span in spans:
            _add(own, *span)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that this rank has processed some indices. UsageError for one that is not this rank's."""
        wanted, places = [int(index) for index in indices], self._division.places
        for index in wanted:
            if index not in places:
                raise UsageError(f"record_indices(): index {index} is not one that rank {self.rank} was to visit")
        for place in sorted(places[index] for index in wanted):
            _add(self._taken.setdefault(self.rank, []), place, place + 1)

    def _span(self, batch_idx: int, batch_size: int) -> tuple[int, int]:
        begin = batch_idx * batch_size
        if batch_idx < 0 or batch_size < 1 or begin >= len(self):
            raise UsageError(
                f"there is no batch {batch_idx} of {batch_size} among the {len(self)} samples of this rank: batches "
                "count from 0 each time the loader is iterated anew"
            )
        return begin, min(begin + batch_size, len(self))

    @property
    def processed_indices(self) -> set[int]:
        """What is processed of this epoch: by this rank, and by all as of the last commit."""
        return set(self._processed().nonzero().flatten().tolist())

    @property
    def processed_num(self) -> int:
        """How many samples of this epoch are processed, as Horovod counts.

        Since they were divided, as many by each of the ranks as by this one.
        """
        own = sum(end - begin for begin, end in self._taken.get(self.rank, []))
        done = self._division.done
        return min(int(done.sum()) + own * self.num_replicas, len(done))

    @property
    def remaining_indices(self) -> list[int]:
        """What was left of this epoch when it was last divided, in the order in which it is visited."""
        indices: list[int] = self._division.left.tolist()
        return indices

    def _processed(self) -> torch.Tensor:
        """Return which indices are processed: by index, bool."""
        done = self._division.done.clone()
        for rank, spans in self._taken.items():
            for begin, end in spans:
                done[self._division.list_of(rank)[begin:end]] = True
        return done

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and what is processed of it: right for all ranks after a commit.

        Horovod's sampler can load it.
        """
        processed = self._processed().nonzero().flatten()
        return {"epoch": self.epoch, "processed_num": self.processed_num, "processed_indices": processed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in an epoch, whose rest is divided among the ranks there are.

        Of a state of Horovod's, which has no indices, the first `processed_num` of the epoch are processed. UsageError
        for indices that the dataset does not have, or a state of something else.
        """
        context = current()
        self.divide_rest_of(state_dict, context.rank, context.size)

    def divide_rest_of(self, state_dict: Mapping[str, Any], rank: int, size: int) -> None:
        """Do as `load_state_dict`, with this rank's number and how many there are as ranks have agreed."""
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
            raise UsageError(f"this state of ElasticSampler has indices beyond a dataset of {len(done)}: use its own")
        done[indices] = True
        self._divide(state_dict["epoch"], done, rank, size)

    # ---- TorchState's side -------------------------------------------------------------------------------------

    def memento(self) -> Memento:
        """Return what `revert` goes back to: the division itself, and copies of notes."""
        return self._division, {rank: list(spans) for rank, spans in self._taken.items()}

    def revert(self, memento: Memento) -> None:
        """Go back, without dividing: all ranks are still to hear what each has processed."""
        self._division, taken = memento
        self._taken = {rank: list(spans) for rank, spans in taken.items()}

    def notes(self) -> list[int]:
        """Return what this rank has processed of its list, to be told to the others."""
        own = self._taken.get(self.rank, [])
        return [*self._division.mark, self.rank, *itertools.chain.from_iterable(own)]

    def hear(self, notes: Sequence[int]) -> bool:
        """Take another rank's notes; False if they are of another division than this rank's."""
        mark, rank, spans = list(notes[:3]), notes[3], notes[4:]
        if mark != self._division.mark:
            return False
        self._taken[rank] = list(zip(spans[::2], spans[1::2]))
        return True


def _add(spans: Spans, begin: int, end: int) -> None:
    """Add a span to others, joining what touches."""
    apart = [span for span in spans if span[1] < begin or span[0] > end]
    touching = [span for span in spans if span[1] >= begin and span[0] <= end]
    begin = min([begin, *(span[0] for span in touching)])
    end = max([end, *(span[1] for span in touching)])
    spans[:] = sorted([*apart, (begin, end)])


def _first_free(spans: Spans, count: int, length: int) -> Spans:
    """Return the first places of a list that are in no span."""
    found, begin = [], 0
    for first, end in [*spans, (length, length)]:
        free = min(first - begin, count)
        if free > 0:
            found.append((begin, begin + free))
            count -= free
        begin = end
    return found
