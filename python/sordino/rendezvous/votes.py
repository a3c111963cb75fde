"""Votes of ranks at the launcher: all of them agree, or the vote fails. All ranks that vote get the same decision.

The launcher decides, so a rank that is lost in the middle cannot leave the others with different views:

| decision | when |
|---|---|
| yes | all ranks of the vote have agreed |
| no | a rank has voted no, or has ended before it voted |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field


@dataclass
class _Vote:
    ranks: frozenset[int]
    agreed: set[int] = field(default_factory=set)
    decided: bool | None = None
    waiting: list[Callable[[bool], None]] = field(default_factory=list)


class Votes:
    """The votes of one job, by their keys. A decision is kept."""

    def __init__(self) -> None:
        self._votes: dict[str, _Vote] = {}

    def take(
        self, key: str, ranks: Iterable[int], rank: int, agrees: bool, tell: Callable[[bool], None], gone: Set[int]
    ) -> None:
        """Take the vote of a rank, and tell it the decision now or later.

        Args:
            key: name of the vote.
            ranks: ranks that must agree.
            rank: the rank that votes.
            agrees: whether it agrees.
            tell: called with the decision.
            gone: ranks that have ended.

        Raises:
            ValueError: the rank has no vote.
        """
        vote = self._votes.setdefault(key, _Vote(frozenset(ranks)))
        if rank not in vote.ranks:
            raise ValueError(f"rank {rank} has no vote on {key}: its ranks are {sorted(vote.ranks)}")
        vote.waiting.append(tell)
        if agrees:
            vote.agreed.add(rank)
        elif vote.decided is None:
            vote.decided = False
        self._decide(vote, gone)

    def note_ended(self, gone: Set[int]) -> None:
        """Decide votes that wait for a rank that has ended."""
        for vote in self._votes.values():
            self._decide(vote, gone)

    def _decide(self, vote: _Vote, gone: Set[int]) -> None:
        if vote.decided is None:
            missing = vote.ranks - vote.agreed
            if not missing:
                vote.decided = True
            elif missing & gone:
                vote.decided = False
        while vote.decided is not None and vote.waiting:
            vote.waiting.pop()(vote.decided)
