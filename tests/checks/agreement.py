"""Orders of submission, names, handles, barriers and the timeline."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import numpy as np
import torch

import sordino.torch as hvd
from checks.registry import Seat, check, wait_for_leftovers
from sordino.errors import UsageError


def raises(kind, text, call, *args, **kwargs) -> None:
    try:
        call(*args, **kwargs)
    except kind as error:
        assert text in str(error), f"{error!r} does not say {text!r}"
        return
    raise AssertionError(f"{call} {args} {kwargs} did not raise {kind.__name__}")


@check()
def any_order_of_any_kind(seat: Seat) -> None:
    total = sum(range(seat.size))
    own = float(seat.rank)
    jobs = []
    for i in range(12):
        jobs += [
            (
                lambda i=i: hvd.allreduce_async(torch.full((i * 50,), own), op=hvd.Sum, name=f"s{i}"),
                lambda out: (out == total).all(),
            ),
            (
                lambda i=i: hvd.allgather_async(torch.tensor([own]), name=f"g{i}"),
                lambda out: out.tolist() == list(range(seat.size)),
            ),
            (
                lambda i=i: hvd.broadcast_async(torch.tensor([own]), i % seat.size, name=f"b{i}"),
                lambda out, i=i: out.item() == i % seat.size,
            ),
            (
                lambda i=i: hvd.alltoall_async(torch.full((seat.size,), own), name=f"t{i}"),
                lambda out: out[0].tolist() == list(range(seat.size)),
            ),
            (
                lambda i=i: hvd.reducescatter_async(torch.full((seat.size,), own), name=f"r{i}", op=hvd.Sum),
                lambda out: out.tolist() == [total],
            ),
            (
                lambda i=i: hvd.grouped_allreduce_async(
                    [torch.tensor(own), torch.tensor([seat.rank])], op=hvd.Max, name=f"m{i}"
                ),
                lambda out: [tensor.item() for tensor in out] == [seat.last, seat.last],
            ),
        ]
    for turn in range(2):  # names may be used again
        order = list(range(len(jobs)))
        random.Random(100 * turn + seat.rank).shuffle(order)
        handles = {i: jobs[i][0]() for i in order}
        random.Random(100 * turn + seat.rank + 50).shuffle(order)
        for i in order:
            assert jobs[i][1](hvd.synchronize(handles[i])), i


@check(least=2)
def a_duplicate_under_way_raises_and_harms_nothing(seat: Seat) -> None:
    calls = {
        "allreduce": lambda: hvd.allreduce_async(torch.ones(3), name="x", op=hvd.Sum),
        "allgather": lambda: hvd.allgather_async(torch.ones(3), name="x"),
        "broadcast": lambda: hvd.broadcast_async(torch.ones(3), 0, name="x"),
        "alltoall": lambda: hvd.alltoall_async(torch.ones(seat.size), name="x"),
        "reducescatter": lambda: hvd.reducescatter_async(torch.ones(seat.size), name="x"),
        "grouped": lambda: hvd.grouped_allreduce_async([torch.ones(3)] * 2, name="x"),
    }
    handles = []
    if seat.rank == 0:
        handles = [call() for call in calls.values()]  # operations of different kinds may share a name
        for label, call in calls.items():
            raises(ValueError, "x", call)
            raises(hvd.HorovodInternalError, label if label != "grouped" else "x", call)
    hvd.barrier()
    if seat.rank > 0:
        handles = [call() for call in calls.values()]
    assert hvd.synchronize(handles[0]).tolist() == [seat.size] * 3
    for handle in handles[1:]:
        hvd.synchronize(handle)
    assert hvd.synchronize(calls["allreduce"]()).tolist() == [seat.size] * 3


@check()
def poll_and_synchronize(seat: Seat) -> None:
    for never in (123456, 0, -1, None, "1", [1], True, torch.tensor(1)):
        raises(UsageError, "no operation of this rank has that handle", hvd.synchronize, never)
        raises(ValueError, "was not created", hvd.poll, never)
    waiting = None
    if seat.size > 1 and seat.rank == 0:
        waiting = hvd.allreduce_async(torch.ones(2), name="late")
        time.sleep(0.02)
        assert hvd.poll(waiting) is False
    hvd.barrier()
    if waiting is None:
        waiting = hvd.allreduce_async(torch.ones(2), name="late")
    limit = time.monotonic() + 60
    while not hvd.poll(waiting):
        assert time.monotonic() < limit
        time.sleep(0.001)
    assert hvd.synchronize(waiting).tolist() == [1, 1]
    assert hvd.synchronize(waiting) is None
    raises(ValueError, str(waiting), hvd.poll, waiting)


@check()
def a_name_is_taken_until_somebody_has_waited(seat: Seat) -> None:
    """A name stays taken until its result was waited for, even if the operation ended long ago. So either all ranks
    refuse the name, or none does."""
    handle = hvd.allreduce_async(torch.ones(2), name="n")
    wait_for_leftovers()
    hvd.barrier()
    raises(ValueError, "but not waited for", hvd.allreduce_async, torch.ones(2), name="n")
    raises(UsageError, "but not waited for", hvd.allreduce, torch.ones(2), name="n")
    assert hvd.synchronize(hvd.allgather_async(torch.ones(1), name="n")).numel() == seat.size
    while not hvd.poll(handle):  # over for the rank, but perhaps not for its device
        time.sleep(0.01)
    another = hvd.allreduce_async(torch.ones(2), name="n", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [1, 1]
    raises(ValueError, "but not waited for", hvd.allreduce_async, torch.ones(2), name="n")  # taken by the second one
    assert hvd.synchronize(another).tolist() == [seat.size] * 2
    assert hvd.allreduce(torch.ones(1), name="n").item() == 1


@check()
def the_caller_need_not_keep_its_tensors(seat: Seat) -> None:
    handles = [hvd.allreduce_async(torch.full((40_000,), float(i)), name=f"{i}") for i in range(20)]
    handles += [hvd.allgather_async(torch.full((1000,), float(i)), name=f"{i}") for i in range(20)]
    noise = [torch.rand(40_000) for _ in range(20)]
    for i, handle in enumerate(handles):
        assert (hvd.synchronize(handle) == i % 20).all()
    assert len(noise) == 20


@check()
def a_handle_nobody_waits_for(seat: Seat) -> None:
    for i in range(30):
        hvd.allreduce_async(torch.ones(5000), name=f"{i}")
    hvd.allreduce_async_(torch.ones(5000), name="in place")
    hvd.barrier()
    assert hvd.allreduce(torch.ones(1)).item() == 1
    hvd.allreduce_async(torch.ones(5000), name="after others have been waited for")
    wait_for_leftovers()


@check(least=2)
def a_barrier_holds_everybody(seat: Seat) -> None:
    mark = Path(seat.folder) / "mark"
    if seat.rank == seat.last:
        time.sleep(0.1)
        mark.write_text("here")
    hvd.barrier()
    assert mark.exists()
    for _ in range(20):
        hvd.barrier()


@check()
def a_barrier_amid_other_operations(seat: Seat) -> None:
    handles = [hvd.allreduce_async(torch.ones(3), name=f"{i}", op=hvd.Sum) for i in range(5)]
    hvd.barrier()
    hvd.broadcast_async(torch.ones(1), 0, name="b")
    hvd.barrier()
    assert [hvd.synchronize(handle)[0].item() for handle in handles] == [seat.size] * 5


@check()
def unnamed_operations_match_in_order(seat: Seat) -> None:
    handles = [hvd.allreduce_async(torch.full((2,), float(i)), op=hvd.Sum) for i in range(10)]
    for i, handle in enumerate(handles):
        assert hvd.synchronize(handle).tolist() == [i * seat.size] * 2
    # Named operations do not count, nor do operations that fail on one rank before they are sent.
    if seat.rank == 0:
        raises(UsageError, "complex", hvd.allreduce, torch.ones(1, dtype=torch.complex64))
        raises(UsageError, "sparse", hvd.allreduce, torch.eye(2).to_sparse())
        raises(UsageError, "root", hvd.broadcast, torch.ones(1), 99)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == seat.size
    assert hvd.broadcast(torch.tensor(seat.rank), seat.last).item() == seat.last


@check()
def arguments_that_cannot_be(seat: Seat) -> None:
    raises(UsageError, "supersedes", hvd.allreduce, torch.ones(1), average=True, op=hvd.Sum)
    ones = torch.ones(1)
    calls = (hvd.allreduce, hvd.allreduce_async_, hvd.reducescatter, hvd.reducescatter_async)
    for call in calls:
        for op in (9, -1, "x", "1", 1.5, True, ones):
            raises(UsageError, f"unknown reduction op={op!r}", call, ones, op=op)
        for factor in (float("nan"), float("inf"), "2", None, 10**400, torch.ones(2), 1j):
            for name in ("prescale_factor", "postscale_factor"):
                raises(UsageError, f"{name}={factor!r}: must be a finite number", call, ones, **{name: factor})
    assert hvd.allreduce(ones, op=np.int64(hvd.Sum), prescale_factor=torch.tensor(2.0)).item() == 2 * seat.size
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for factor in (0, float("nan"), "2"):
        raises(
            UsageError, "gradient_predivide_factor=", hvd.DistributedOptimizer, optimizer,
            gradient_predivide_factor=factor,
        )  # fmt: skip
    raises(UsageError, "NUL", hvd.start_timeline, "a\0b")
    raises(UsageError, "torch.Tensor", hvd.allreduce, [1.0])
    for call in (hvd.grouped_allreduce_, hvd.grouped_allreduce_async):
        raises(UsageError, "at least one", call, [])
    raises(UsageError, "at least one", hvd.grouped_allgather_async, [])
    raises(UsageError, "at least one", hvd.grouped_reducescatter_async, [])
    raises(hvd.HorovodInternalError, "not supported", hvd.allreduce, torch.ones(1, dtype=torch.complex128))
    raises(Exception, "meta", hvd.allreduce, torch.ones(1, device="meta"))
    assert hvd.allreduce(torch.ones(1)).item() == 1


@check()
def empty_groups_raise_in_the_blocking_forms_too(seat: Seat) -> None:
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        raises(UsageError, "at least one", call, [])


@check()
def timeline(seat: Seat) -> None:
    path = Path(seat.folder) / "timeline.json"
    for turn in range(2):
        hvd.start_timeline(str(path) + str(turn), mark_cycles=turn == 1)
        hvd.allreduce(torch.ones(1000), name="weights")
        hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(3)] * 2, name='odd "name"\n\\'))
        hvd.allgather(torch.ones(2), name="rows")
        hvd.broadcast(torch.ones(2), 0, name="start")
        hvd.barrier()
        hvd.stop_timeline()
        hvd.stop_timeline()  # harmless when none is running
        if seat.rank > 0:
            continue
        text = (path.parent / f"{path.name}{turn}").read_text()
        events = json.loads(text)
        events = events["traceEvents"] if isinstance(events, dict) else events
        for word in ("ALLREDUCE", "ALLGATHER", "BROADCAST"):
            assert f'"NEGOTIATE_{word}"' in text, word
            # For tensors on a GPU the event also names the route.
            assert re.search(f'"((IPC|MPI|NCCL|STAGED|ALONE)_)?{word}"', text), word
        assert "allreduce.weights" in text and "allgather.rows" in text
        assert ("CYCLE_START" in text) == (turn == 1)
        for event in events:
            if event.get("ph") == "X":
                assert event["ts"] >= 0 and event["dur"] >= 0
    assert hvd.allreduce(torch.ones(1)).item() == 1
