"""Text of `sordino inspect`: which ranks hold up the others, from the answers of all ranks of a machine.

Each rank that has called an operation knows that the operation is pending. Only the rank that coordinates the operation
knows which ranks have not called it. So the answers are joined by the operation's name. A rank that holds up an
operation is *late*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST_FRAMES = 8
_DOES_NOT_KNOW = "undecided"  # the stage in which only the coordinator knows which ranks are late


@dataclass
class _Held:
    """A pending operation: its longest wait in seconds, the ranks that wait in it, and the late ranks."""

    seconds: float = 0.0
    waiting: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    coordinators: set[int] = field(default_factory=set)


def held_up(worlds: Iterable[dict[str, Any]]) -> dict[str, _Held]:
    """Return the pending operations by name, from the answers of one job's ranks about their world."""
    found: dict[str, _Held] = defaultdict(_Held)
    for world in worlds:
        for stage, what, seconds, ranks in world["waits"] or ():
            held = found[what]
            held.seconds = max(held.seconds, seconds)
            if stage == _DOES_NOT_KNOW:
                held.coordinators.update(ranks)
            else:
                held.late.update(ranks)
            if world["rank"] not in ranks or stage == _DOES_NOT_KNOW:
                held.waiting.add(world["rank"])
    return found


def described(answers: Sequence[dict[str, Any]], all_threads: bool = False) -> Iterator[str]:
    """Yield the lines of `sordino inspect`.

    Args:
        answers: result of `ask_all`.
        all_threads: show the stacks of all threads of all ranks, not only those that matter.
    """
    jobs: dict[tuple[str, int], list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for answer in answers:
        for world in answer.get("worlds", ()):
            jobs[world["job"], world["size"]].append((answer, world))
    silent = {answer["pid"]: answer["silent"] for answer in answers if "silent" in answer}
    for (_, size), members in jobs.items():
        members.sort(key=lambda member: int(member[1]["rank"]))
        yield from _job(size, members, silent, all_threads)
    known = {pid for members in jobs.values() for _, world in members for _, pid in world["places"]}
    for pid, why in silent.items():
        if pid not in known:
            yield f"process {pid} {why}"


def _job(
    size: int, members: list[tuple[dict[str, Any], dict[str, Any]]], silent: dict[int, str], all_threads: bool
) -> Iterator[str]:
    answer, world = members[0]
    yield f"{size} ranks of `{' '.join(answer['command'])}`, {len(members)} of them answer here"
    by_rank = {one["rank"]: process for process, one in members}
    held = held_up(one for _, one in members)
    late: set[int] = set()
    for what, operation in sorted(held.items(), key=lambda item: -item[1].seconds):
        late |= operation.late - operation.waiting
        yield f"  {what}, {operation.seconds:.1f} s: {_who(operation)}"
    if not held:
        yield "  no rank waits for another"
    for _, one in members:
        if one["failed"]:
            yield f"  rank {one['rank']}: its world has failed"
        if one["waits"] is None:
            yield f"  rank {one['rank']}: no thread polls for messages, so its operations do not move"
    for rank in sorted(late if not all_threads else late | set(by_rank)):
        yield from _rank(rank, world["places"][rank], by_rank.get(rank), silent, all_threads)


def _who(held: _Held) -> str:
    """Return which ranks wait for which."""
    waiting = f"{_numbers(held.waiting)} {'wait' if len(held.waiting) > 1 else 'waits'}" if held.waiting else "waits"
    if held.late:
        return f"{waiting} for {_numbers(held.late)}"
    if held.coordinators:
        return f"{waiting}, and {_numbers(held.coordinators)}, which coordinates it, knows for which ranks"
    return f"{waiting} for its data"


def _numbers(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return ("ranks " if len(listed) > 1 else "rank ") + ", ".join(map(str, listed)) if listed else ""


def _rank(
    rank: int, place: Sequence[Any], answer: dict[str, Any] | None, silent: dict[int, str], all_threads: bool
) -> Iterator[str]:
    host, pid = place
    if answer is None:
        why = silent.get(pid) or "does not answer here: run `sordino inspect` on its host"
        yield f"  rank {rank} (process {pid} on {host}) {why}"
        return
    yield f"  rank {rank} (process {pid} on {host}):"
    for thread in answer["threads"] if all_threads else answer["threads"][:1]:
        if all_threads:
            yield f"    thread {thread['name']}"
        for file, line, function, code in thread["stack"][-_MOST_FRAMES:]:
            yield f'    File "{file}", line {line}, in {function}'
            if code:
                yield f"      {code}"
