"""Internal process sets of algorithms. All ranks of the parent set create them; only the core knows them.

A set has memory and is never removed, because ranks release objects at different times. A set that all of its ranks
have released is reused for the next object.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from sordino._core import Request
from sordino.runtime import opcode
from sordino.runtime.collectives.objects import allgather_object
from sordino.runtime.context import Context
from sordino.runtime.exchange.channel import Channel
from sordino.runtime.process_set import ProcessSet


def _new_set(context: Context, ranks: Sequence[int], parent: ProcessSet) -> int:
    identity = parent.process_set_id or 0
    name = context.names.plan("internal_process_set", identity)
    handle = context.world.run(Request(opcode.ADD_SET, name, [], new_set=ranks, process_set=identity))
    handle.wait()
    return handle.set_id


def _idle_or_new_set(context: Context, ranks: Sequence[int], parent: ProcessSet) -> int:
    key = parent.process_set_id or 0, tuple(ranks)
    if key in context.internal.idle:
        idle = context.internal.idle[key]
        mine = {number: context.internal.exchanges[number] for number in idle} if context.rank in ranks else None
        gathered: list[dict[int, int] | None] = allgather_object(
            mine, name=context.names.plan("idle_channels", key[0]), process_set=parent
        )
        first, *others = [one for one in gathered if one is not None]
        # A set on which some ranks have begun more exchanges cannot be used: the other ranks would match these with
        # exchanges of the next object.
        numbers = [number for number, begun in first.items() if all(one.get(number) == begun for one in others)]
        if numbers:
            idle.discard(min(numbers))
            return min(numbers)
    context.internal.idle.setdefault(key, set())
    return _new_set(context, ranks, parent)


def new_channel(context: Context, process_set: ProcessSet) -> Channel:
    """Make a channel for the exchanges of one object, whose order is independent of other exchanges.

    Collective over the process set.
    """
    return own_channel(context, process_set, [process_set.ranks or []])


def own_channel(context: Context, process_set: ProcessSet, parts: Sequence[Sequence[int]]) -> Channel:
    """Make a channel, as `new_channel`, for each of these parts of a process set. Return that of this rank's part.

    Collective over the process set.
    """
    made = [(_idle_or_new_set(context, members, process_set), members) for members in parts]
    for number, members in made:
        if context.rank in members:
            channel = Channel(context, process_set, number)
            key = process_set.process_set_id or 0, tuple(members)
            weakref.finalize(channel, _give_back, weakref.ref(context), context.epoch, key, number)
            return channel
    return Channel(context, process_set, None)


def _give_back(its: weakref.ref[Context], epoch: int, key: tuple[int, tuple[int, ...]], number: int) -> None:
    context = its()
    if context is not None and context.epoch == epoch and key in context.internal.idle:
        context.internal.idle[key].add(number)


def channel_of(context: Context, process_set: ProcessSet) -> Channel:
    """Return the shared channel of a process set, for exchanges of any object. Collective the first time."""
    identity = process_set.process_set_id or 0
    if identity not in context.internal.channels:
        context.internal.channels[identity] = _new_set(context, process_set.ranks or [], process_set)
    return Channel(context, process_set, context.internal.channels[identity])


def part_of(context: Context, process_set: ProcessSet, key: tuple[str, int], parts: Sequence[list[int]]) -> ProcessSet:
    """Return the process set of this rank's part of a process set.

    Collective over `process_set` the first time for each key.
    """
    name = (process_set.process_set_id or 0, *key)
    for members in parts if name not in context.internal.groups else ():
        identity = _new_set(context, members, process_set)
        if context.rank in members:
            context.internal.groups[name] = (identity, members)
    identity, members = context.internal.groups[name]
    part = ProcessSet(members)
    part.process_set_id = identity
    return part


def group_of(context: Context, process_set: ProcessSet, size: int) -> ProcessSet:
    """Return the group of `size` neighboring ranks that contains this rank.

    Collective over `process_set` the first time.
    """
    ranks = list(process_set.ranks or [])
    if size == len(ranks):
        return process_set
    groups = [ranks[begin : begin + size] for begin in range(0, len(ranks), size)]
    return part_of(context, process_set, ("group", size), groups)


def peers_of(context: Context, process_set: ProcessSet, size: int) -> ProcessSet:
    """Return the set of ranks that have the same number within their groups of `size` as this rank.

    Collective over `process_set` the first time.
    """
    ranks = list(process_set.ranks or [])
    if size == 1:
        return process_set
    return part_of(context, process_set, ("peers", size), [ranks[place::size] for place in range(size)])
