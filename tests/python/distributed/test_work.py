"""Work objects of torch.distributed, on ranks that are threads."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import sordino.torch as hvd
from sordino import sim
from sordino.awake import Deadline
from sordino.distributed import monitored
from sordino.distributed import work as work_module
from sordino.distributed.collectives import Collectives
from sordino.distributed.operations import Operations
from sordino.distributed.place import Place, find_place
from sordino.distributed.submissions import Parts
from sordino.distributed.work import Part, SordinoWork
from sordino.runtime.context import current


def test_what_another_thread_waits_for_is_not_over() -> None:
    def work() -> None:
        if hvd.rank() == 1:
            hvd.barrier()
            hvd.send(torch.ones(3), 0, tag=7)
            return
        tensor, context = torch.zeros(3), current()
        (part,), sender = Collectives(context).receive(tensor, 1, 7)
        assert not part.is_done()
        waiting = threading.Thread(target=part.complete)
        waiting.start()
        while context.pending.find(1) is not None:  # until the thread has taken the handle
            time.sleep(0.001)
        assert not part.is_done()
        hvd.barrier()
        waiting.join()
        assert part.is_done() and sender() == 1 and tensor.tolist() == [1.0] * 3

    sim.run(2, work)


def test_a_message_that_has_not_come_delays_no_future() -> None:
    def work() -> None:
        do = Operations(Place(current(), None))
        other, total = torch.zeros(3), torch.ones(4)
        told = do.recv([other], 1, 9).get_future() if hvd.rank() == 0 else None
        summed = do.allreduce([total]).get_future()
        limit = time.monotonic() + 20
        while not summed.done() and time.monotonic() < limit:
            time.sleep(0.001)
        assert summed.done() and total.tolist() == [2.0] * 4
        hvd.barrier()
        if told is None:
            do.send([torch.ones(3)], 0, 9).wait()
        else:
            told.wait()
            assert other.tolist() == [1.0] * 3

    sim.run(2, work)


def test_a_group_keeps_its_ranks() -> None:
    """So ranks that continue after a loss, with other numbers, can have no group."""

    def work() -> None:
        with pytest.raises(hvd.UsageError, match="cannot be used with on_peer_lost='continue'"):
            find_place(dist.HashStore(), hvd.rank(), hvd.size(), timedelta(seconds=1))

    sim.run(2, work, on_peer_lost="continue")


def polled(parts: Parts) -> SordinoWork:
    work = SordinoWork(parts)
    while not work.is_completed():
        time.sleep(0.001)
    return work


def test_results_are_there_when_an_operation_is_over() -> None:
    """A caller that polls, and does not wait, finds the results: also those that are copied to their places."""

    def work() -> None:
        do, total = Collectives(current()), ReduceOp(ReduceOp.SUM)
        mine, pairs = torch.full((2,), do.rank + 1.0), [[1.0, 1.0], [2.0, 2.0]]
        for _ in range(3):  # an operation may be a repetition from its second time on
            room = [torch.zeros(2) for _ in range(2)]
            polled(do.all_gather_list(room, mine, False))
            assert [one.tolist() for one in room] == pairs
            room = [torch.zeros(2) for _ in range(2)]
            polled(do.all_to_all_list(room, [mine, mine], False))
            assert [one.tolist() for one in room] == pairs
            turned = torch.full((3, 2), do.rank + 1.0).t()  # not row-major
            polled(do.all_reduce(turned, total, False))
            assert turned.tolist() == [[3.0] * 3] * 2
            output = torch.zeros(2)
            polled(do.scatter(output, [mine, mine + 1] if do.rank == 0 else [], 0, False))
            assert output.tolist() == [do.rank + 1.0] * 2
        uneven = [torch.zeros(2), torch.zeros(3)]
        assert polled(do.all_gather_list(uneven, torch.ones(2 + do.rank), False)).is_success()
        wrong = polled(do.all_reduce(torch.ones(2 + do.rank), total, False))
        assert not wrong.is_success() and "differ in shape" in str(wrong.exception())
        with pytest.raises(ValueError, match="differ in shape"):
            wrong.wait()

    sim.run(2, work)


def test_what_begins_in_inference_mode_may_end_outside() -> None:
    """The thread that completes futures is in no such mode, and a caller may wait later."""

    def work() -> None:
        do, total = Collectives(current()), ReduceOp(ReduceOp.BOR)
        for later in (True, False):
            with torch.inference_mode():
                mine = torch.tensor([do.rank + 1, 4])
                rooms, output = [torch.zeros(2, dtype=torch.int64) for _ in range(2)], torch.zeros(1, dtype=torch.int64)
                works = [
                    SordinoWork(do.all_gather_list(rooms, mine, False), rooms),
                    SordinoWork(do.reduce_scatter(output, mine, total, False), [output]),
                    SordinoWork(do.all_reduce(mine, total, False), [mine]),
                ]
            for one in works:
                one.wait() if later else one.get_future().wait()
            assert [room.tolist() for room in rooms] == [[1, 4], [2, 4]]
            assert output.tolist() == ([3] if do.rank == 0 else [4]) and mine.tolist() == [3, 4]

    sim.run(2, work)


class Stops:
    """A clock of a process that is stopped for 100 s at each call of `stop`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(module, "Deadline", partial(Deadline, clock=lambda: self.seconds))

    def stop(self, *_: object) -> None:
        self.seconds += 100


def test_stopped_time_does_not_count_for_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = Stops(monkeypatch, work_module), iter([False, False, True])

    def is_done() -> bool:
        clock.stop()
        return next(looks)

    assert SordinoWork([Part(is_done, lambda: None)]).wait(timedelta(seconds=5))
    with pytest.raises(dist.DistBackendError, match="not over after 5 s"):
        SordinoWork([Part(lambda: clock.stop() or False, lambda: None)]).wait(timedelta(seconds=5))


def test_stopped_time_does_not_count_for_a_monitored_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Stops(monkeypatch, monitored)
    store = SimpleNamespace(wait=clock.stop, set=lambda *_: None, check=lambda _: clock.seconds >= 300)
    monitored.barrier(store, 0, 2, timedelta(seconds=5), False)
    store.check = lambda _: False
    with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier in 5000 ms"):
        monitored.barrier(store, 0, 2, timedelta(seconds=5), False)
