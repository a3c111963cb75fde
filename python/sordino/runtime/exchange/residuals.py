"""Residuals of encoded means in checkpoints: what error feedback has kept for later steps.

`CompressedMean` (compressed_mean.py) and `LowRankMean` (low_rank_mean.py) have them.

Residuals belong to one rank, so a state has them under the rank's number:

    {"by_rank": {3: {"ranks": [2, 3], "workers": 4, "size": 4, "codec": "Sign(block=128)", "means": [mean, ...]}}}

A mean is {"pieces": [[name, begin, end, at, whole], ...], "residuals": [tensor, ...]}. `checkpoint.share` saves values
under "by_rank" in whole, so the shards of all ranks together have the residuals of all ranks. Each rank loads its own:

| the state has | this rank |
|---|---|
| its residuals, of the same ranks, codec and pieces | copies them, so training continues with the same bits |
| its residuals, of other ranks, another codec or other pieces | *moves* them: what is still owed is sent, see below |
| residuals of a rank that no longer exists | rank number % size moves these to its own |
| residuals of other ranks only | starts from 0, with a warning |
| residuals of parameters that are unknown or have another size | drops these, with a warning |

A rank of N owes the mean (own residual + N times the residual of its shard) / N. If N becomes M, the moved residual is
M / N times the sum in parentheses, so that the mean of M ranks owes the same. If the ranks are divided into groups with
a mean each, the factor M / N counts the ranks of all groups (`workers`), so that the mean of all groups owes the same.
Sums, and means over the ranks that have sent a value (`TopK(contributors=True)`), do not depend on the number of ranks.
Their residuals are moved without a factor.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sordino.codecs import Codec, TopK
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST
from sordino.runtime.exchange.saved_residuals import BY_RANK, WAS, Piece, Saved, checked, drop
from sordino.runtime.process_set import ProcessSet

_NAMED = 4  # maximum number of parameters in a warning
_FIX = "Save state_dict() of every rank, and load it on the same rank (docs/compression.md)"


class Encoded(Protocol):
    """Mean of values that are sent encoded: `CompressedMean`, or a `TensorMean` (tensor_means.py)."""

    @property
    def residuals(self) -> list[torch.Tensor]:
        """Residuals, as in `CompressedMean`: for all values, then for a shard if there is one. Float32 tensors."""
        ...


@dataclass(frozen=True)
class Sender:
    """The rank that sends encoded values.

    Attributes:
        rank: its world rank.
        ranks: the world ranks that take the mean.
        size: number of ranks of the world.
        codec: the codec.
        sums: whether the result is the number of ranks times the mean.
        workers: number of ranks that send the same elements, to this mean or to that of another group; None: all
            `ranks` and no others.
    """

    rank: int
    ranks: tuple[int, ...]
    size: int
    codec: Codec
    sums: bool = False
    workers: int | None = None

    @staticmethod
    def of(
        context: Context, process_set: ProcessSet, codec: Codec, sums: bool = False, workers: int | None = None
    ) -> Sender:
        """Return this rank as a member of a process set. The other arguments are those of the class."""
        return Sender(context.rank, tuple(process_set.ranks or ()), context.size, codec, sums, workers)

    @property
    def count(self) -> int:
        """Number of ranks that send the same elements."""
        return len(self.ranks) if self.workers is None else self.workers

    @property
    def keeps(self) -> bool:
        """Whether this rank keeps residuals."""
        return self.codec.feedback and len(self.ranks) > 1 and self.rank in self.ranks

    @property
    def factor(self) -> int:
        """Ratio of the residuals to what this rank owes the result."""
        by_sender = isinstance(self.codec, TopK) and self.codec.contributors
        return 1 if self.sums or by_sender else self.count


class Feedback:
    """Residuals of the means of one rank, for its state.

    Args:
        sender: this rank.
        what: name of the values that are sent, for warnings.
    """

    def __init__(self, sender: Sender, what: str) -> None:
        self._sender, self._what = sender, what
        self._means: list[tuple[list[Piece], Encoded]] = []
        self._saved: list[Saved] = []

    def attach(self, pieces: Sequence[Piece], mean: Encoded) -> None:
        """Include a mean in the state. It takes the residuals of its pieces from the state that was loaded last.

        Args:
            pieces: the parameters in its values.
            mean: the mean, with residuals of 0.
        """
        if mean.residuals:
            self._means.append((list(pieces), mean))
            self._give(*self._means[-1])

    def detach(self) -> None:
        """Forget all means. They keep their residuals, which are no longer in the state."""
        self._means = []

    def state(self) -> dict[str, Any]:
        """Return copies of this rank's residuals, also of loaded ones that no mean has taken; {} without residuals."""
        found = [(pieces, mean.residuals) for pieces, mean in self._means]
        found += [(saved.pieces, saved.residuals) for saved in self._saved]
        if not found:
            return {}
        sender = self._sender
        own = {
            "ranks": list(sender.ranks),
            "workers": sender.count,
            "size": sender.size,
            "codec": repr(sender.codec),
            "means": [
                {"pieces": [list(piece) for piece in pieces], "residuals": [one.clone() for one in residuals]}
                for pieces, residuals in found
            ],
        }
        return {BY_RANK: {sender.rank: own}}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Replace all residuals by those of a state; all become 0 if it is empty. Not collective.

        Args:
            state: result of `state()`, or a state with the residuals of several ranks.
            sizes: numbers of elements of the parameters that this rank has, by their names.

        Raises:
            UsageError: `state` has another form. Nothing is changed.
        """
        entries = checked(state, self._what)
        self._saved = []
        for _, mean in self._means:
            for residual in mean.residuals:
                residual.zero_()
        if not entries:
            return
        if not self._sender.keeps:
            drop(state, self._what, f"{self._sender.codec} among {len(self._sender.ranks)} ranks keeps none")
            return
        heirs = [rank for rank in entries if self._heir(rank) == self._sender.rank]
        for rank in heirs:
            self._take(rank, entries[rank], sizes)
        self._warn_of_missing(entries)
        for pieces, mean in self._means:
            self._give(pieces, mean)

    def drop_rest(self, names: Collection[str], why: str) -> None:
        """Drop the residuals of these parameters that no mean has taken, with a warning.

        Args:
            names: the names of the parameters.
            why: reason, for the warning.
        """
        lost = 0
        for saved in self._saved:
            self._move(saved)
            for piece in saved.pieces:
                if piece.name in names:
                    part = saved.part(piece, piece.begin, piece.end)
                    lost += int(part.count_nonzero())
                    part.zero_()
        self._forget_empty()
        if lost:
            warnings.warn(f"{self._what}: {lost} residuals are lost, because {why}", RuntimeWarning, stacklevel=2)

    def _heir(self, rank: int) -> int:
        """Return the rank of this job that takes the residuals that `rank` of the saving job has saved."""
        return rank if rank < self._sender.size else rank % self._sender.size

    def _take(self, rank: int, entry: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        sender, ranks, was = self._sender, tuple(entry["ranks"]), entry.get(WAS, rank)
        count = entry.get("workers", len(ranks))  # states of earlier versions lack it
        same = (was, ranks, count, entry["codec"]) == (sender.rank, sender.ranks, sender.count, repr(sender.codec))
        scale = 1.0 if sender.factor == 1 else sender.count / count
        unknown: list[str] = []
        for mean in entry["means"]:
            pieces = [Piece(*piece) for piece in mean["pieces"]]
            saved = Saved(pieces, [one.to(HOST, torch.float32, copy=True) for one in mean["residuals"]])
            known = [piece for piece in pieces if sizes.get(piece.name) == piece.whole]
            unknown += [piece.name for piece in pieces if sizes.get(piece.name) != piece.whole]
            if not same or len(known) < len(pieces):
                saved.pieces = known
                saved.move(ranks.index(was), len(ranks), scale)
            self._saved.append(saved)
        if unknown:
            some = ", ".join(list(dict.fromkeys(unknown))[:_NAMED])
            drop(entry, self._what, f"this model has no parameters of these names and sizes: {some}")

    def _warn_of_missing(self, entries: Mapping[int, Mapping[str, Any]]) -> None:
        """Warn of residuals that this rank would have taken, but that are not in the state.

        None are missing from a state of this rank itself (`WAS`), even if its number has changed.
        """
        if any(WAS in entry for entry in entries.values()):
            return
        mine = self._sender.rank
        members = {rank for entry in entries.values() for rank in entry["ranks"]} | {mine}
        before = max(entry["size"] for entry in entries.values())
        wanted = [rank for rank in range(before) if rank in members and self._heir(rank) == mine]
        missing = [rank for rank in wanted if rank not in entries]
        if missing:
            ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            warnings.warn(
                f"{self._what}: the state has residuals of error feedback of rank "
                f"{', '.join(map(str, sorted(entries)))} of {before}, but not those of {ranks}, which rank {mine} "
                f"would continue with. They are lost: what these ranks had not sent yet is never sent. {_FIX}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _give(self, pieces: Sequence[Piece], mean: Encoded) -> None:
        """Move the residuals of these pieces from the loaded state to a mean."""
        lengths = [len(one) for one in mean.residuals]
        for number, saved in enumerate(self._saved):
            fits = saved.pieces == pieces and [len(one) for one in saved.residuals] == lengths
            if fits and not saved.moved:
                for mine, value in zip(mean.residuals, saved.residuals):
                    mine.copy_(value)
                del self._saved[number]
                break
        targets: dict[str, list[Piece]] = {}
        for piece in pieces:
            targets.setdefault(piece.name, []).append(piece)
        for saved in self._saved:
            sources = [piece for piece in saved.pieces if piece.name in targets]
            if sources:
                self._move(saved)
            for source in sources:
                for piece in targets[source.name]:
                    begin, end = max(source.begin, piece.begin), min(source.end, piece.end)
                    if begin < end:
                        part = saved.part(source, begin, end)
                        at = piece.at + begin - piece.begin
                        mean.residuals[0][at : at + len(part)].add_(part.to(mean.residuals[0].device))
                        part.zero_()
        self._forget_empty()

    def _move(self, saved: Saved) -> None:
        """Move residuals that this rank has saved itself, among the same ranks and with the same codec."""
        if not saved.moved:
            sender = self._sender
            saved.move(sender.ranks.index(sender.rank), len(sender.ranks), 1.0)

    def _forget_empty(self) -> None:
        self._saved = [saved for saved in self._saved if not saved.moved or bool(saved.residuals[0].any())]
