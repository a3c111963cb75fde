"""Random choice of peers for asynchronous workers: uniform over the workers that are present, the same in every run."""

from __future__ import annotations

_MASK = (1 << 64) - 1


class Draws:
    """Generator of random numbers for one worker. The same seed gives the same numbers in every run."""

    def __init__(self, rank: int, seed: int) -> None:
        self._state = (seed * 0x9E3779B97F4A7C15 + rank * 0xD1B54A32D192ED03 + 1) & _MASK

    def below(self, bound: int) -> int:
        """Return a uniformly distributed integer from 0 to bound - 1 (SplitMix64)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) * bound) >> 64


class Peers:
    """Set of all workers except `me` and the absent ones. Its memory grows only with the number of absent workers."""

    def __init__(self, me: int, size: int) -> None:
        self._me, self._size = me, size
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return self._size - 1 - len(self._gone)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and 0 <= rank < self._size and rank != self._me and rank not in self._gone

    def add(self, rank: int) -> None:
        """Note that a rank is present (again)."""
        self._gone.discard(rank)

    def discard(self, rank: int) -> None:
        """Note that a rank is absent."""
        if rank in self:
            self._gone.add(rank)

    def draw(self, draws: Draws) -> int | None:
        """Return one of the workers, each with equal probability; None if no worker is left."""
        if len(self) <= 0:
            return None
        for _ in range(64):
            rank = draws.below(self._size)
            if rank in self:
                return rank
        left = [rank for rank in range(self._size) if rank in self]  # probably few, since 64 draws have found none
        return left[draws.below(len(left))]
