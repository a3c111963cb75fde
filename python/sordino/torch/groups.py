"""Process sets that algorithms make for themselves, once, by all ranks of the parent; the core alone knows them."""

from __future__ import annotations

from collections.abc import Sequence

from sordino import kinds
from sordino.context import Context
from sordino.torch.process_sets import ProcessSet


def _new_set(context: Context, ranks: Sequence[int], parent: ProcessSet) -> int:
    identity = parent.process_set_id or 0
    name = context.plan_name("internal_process_set", identity)
    handle = context.world.run(kinds.ADD_SET, name, [], splits=list(ranks), process_set=identity)
    handle.wait()
    return int(handle.numbers[0])


def new_channel(context: Context, process_set: ProcessSet) -> int:
    """A set for the exchanges of one object, which come in an order of their own. Collective over the process set."""
    return _new_set(context, process_set.ranks or [], process_set)


def own_channel(context: Context, process_set: ProcessSet, parts: Sequence[Sequence[int]]) -> int | None:
    """Makes a set for exchanges of each part of a process set; the one of the part that this rank is in, if it is in
    any. Collective over the process set."""
    made = [(_new_set(context, members, process_set), members) for members in parts]
    return next((number for number, members in made if context.rank in members), None)


def channel_of(context: Context, process_set: ProcessSet) -> int:
    """The set that exchanges of a process set run on. Collective over it the first time."""
    identity = process_set.process_set_id or 0
    if identity not in context.channels:
        context.channels[identity] = new_channel(context, process_set)
    return context.channels[identity]


def part_of(context: Context, process_set: ProcessSet, key: tuple[str, int], parts: Sequence[list[int]]) -> ProcessSet:
    """The one of the parts of a process set that this rank is in. Collective the first time that a key comes."""
    name = (process_set.process_set_id or 0, *key)
    for members in parts if name not in context.groups else ():
        identity = _new_set(context, members, process_set)
        if context.rank in members:
            context.groups[name] = (identity, members)
    identity, members = context.groups[name]
    part = ProcessSet(members)
    part.process_set_id = identity
    return part


def group_of(context: Context, process_set: ProcessSet, size: int) -> ProcessSet:
    """The group of `size` neighbouring ranks that this rank is in. Collective over `process_set` the first time."""
    ranks = list(process_set.ranks or [])
    if size == len(ranks):
        return process_set
    groups = [ranks[begin : begin + size] for begin in range(0, len(ranks), size)]
    return part_of(context, process_set, ("group", size), groups)


def peers_of(context: Context, process_set: ProcessSet, size: int) -> ProcessSet:
    """The ranks with this rank's number in their groups of `size`. Collective over `process_set` the first time."""
    ranks = list(process_set.ranks or [])
    if size == 1:
        return process_set
    return part_of(context, process_set, ("peers", size), [ranks[place::size] for place in range(size)])
