"""Work objects of torch.distributed, on ranks that are threads."""

from __future__ import annotations

import threading
import time

import torch

import sordino.torch as hvd
from sordino import sim
from sordino.distributed.collectives import Collectives
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
