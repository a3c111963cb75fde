"""CUDA graphs together with our operations: graphs of users stay correct, and operations that cannot be captured
raise."""

from __future__ import annotations

import time

import pytest
import torch
from checks.models import MODELS, batch, fill, loss_of, part
from checks.reference import assert_reduced
from rank_operations import inputs
from rank_seat import Seat, check
from rank_streams import SLOW
from rank_training import ROWS, STEPS, momentum

import sordino.torch as hvd
from sordino.errors import UsageError


def first_operations(seat: Seat) -> None:
    """NCCL connects ranks in threads of its own, and their calls end a capture of any thread. So the first operation of
    each kind comes before captures (docs/gpus.md)."""
    mine = torch.ones(300_001, device=seat.device)
    hvd.allreduce(mine, op=hvd.Sum, name="first")
    hvd.allgather(mine, name="first")
    torch.cuda.synchronize()


@check(cuda=True)
def a_capture_beside_operations_under_way(seat: Seat) -> None:
    """Our threads request events and memory of the GPU during the user's capture, and must not spoil it."""
    given = inputs(seat, 300_001, torch.float32)
    x = torch.zeros(1000, device=seat.device)
    first_operations(seat)
    for turn in range(4):
        torch.cuda._sleep(SLOW)
        mine = seat.put(given[seat.rank])
        handles = [hvd.allreduce_async(mine, name=f"beside.{k}", op=hvd.Sum) for k in range(3)]
        handles.append(hvd.allgather_async(mine[:1000], name="beside"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(seat.device)):  # torch.cuda.graph would wait for the operations first
            graph.capture_begin()
            y = x * 2 + turn
            time.sleep(0.1)
            graph.capture_end()
        results = [hvd.synchronize(handle) for handle in handles]
        x.fill_(3.0)
        graph.replay()
        assert y.tolist() == [6.0 + turn] * 1000
        for result in results[:3]:
            assert_reduced(result.cpu(), hvd.Sum, given)
        assert torch.equal(results[3].cpu(), torch.cat([one[:1000] for one in given]))


@check(cuda=True)
def replays_between_operations(seat: Seat) -> None:
    """One graph makes the input of an operation, another uses its output, in the same memory each time."""
    mine, total = (torch.zeros(50_000, device=seat.device) for _ in range(2))
    before, after = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(before):
        mine.add_(seat.rank + 1)
    with torch.cuda.graph(after):
        total.add_(mine)
    wanted, sum_of = 0.0, 0.0
    for turn in range(5):
        before.replay()
        hvd.allreduce_(mine, op=hvd.Average, name=f"between.{turn}")
        after.replay()
        wanted += (seat.size + 1) / 2
        sum_of += wanted
    torch.testing.assert_close(mine.cpu(), torch.full((50_000,), wanted))
    torch.testing.assert_close(total.cpu(), torch.full((50_000,), sum_of))


@check(cuda=True)
def graphed_callables(seat: Seat) -> None:
    """Forward and backward as CUDA graphs of PyTorch, wrapped afterwards: gradients are averaged between replays."""
    model, twin = (fill(MODELS["small"]().double(), 3) for _ in range(2))
    model.to(seat.device)
    sample = seat.put(part(batch(ROWS * seat.size, 0), seat.rank, seat.size)[0])
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters())
    reference = momentum(twin)
    for turn in range(STEPS):
        whole = batch(ROWS * seat.size, turn)
        x, y = (seat.put(one) for one in part(whole, seat.rank, seat.size))
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of(graphed, x, y).backward()
        loss_of(twin, *whole).backward()
        optimizer.step()
        reference.step()
    for (name, mine), wanted in zip(model.named_parameters(), twin.parameters()):
        torch.testing.assert_close(mine.detach().cpu(), wanted.detach(), atol=1e-9, rtol=1e-9, msg=name)
        seat.same(name, mine)


@check(cuda=True)
def an_operation_cannot_be_captured(seat: Seat) -> None:
    """Submitting raises on every rank, and the world stays usable. This is the last check, so that it cannot affect
    others."""
    mine = seat.put(torch.full((1000,), float(seat.rank)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.mul_(1)
        with pytest.raises(UsageError, match="captur"):
            hvd.allreduce_(mine, name="captured", op=hvd.Sum)
    graph.replay()
    assert hvd.allreduce(mine, name="afterwards", op=hvd.Sum).tolist() == [sum(range(seat.size))] * 1000
