"""Order of work: operations begin after their inputs are computed, and code that uses their outputs runs after them.
Memory that is freed meanwhile is not reused too early. No check waits for the whole device."""

from __future__ import annotations

import gc
import random
import time
from functools import partial
from itertools import combinations

import pytest
import torch
from checks.reference import assert_reduced, values
from rank_operations import inputs
from rank_seat import LeftOut, Seat, check

import sordino.torch as hvd
from sordino.errors import UsageError
from sordino.runtime.context import current

SLOW = 60_000_000  # clock cycles: tens of milliseconds


@check(cuda=True, each=("sleep", "products"))
def inputs_that_are_still_being_computed(seat: Seat, how: str) -> None:
    """The inputs are computed on a side stream; outputs are used at once."""
    left = torch.randn(2000, 2000, device=seat.device)
    for turn in range(4):
        side = torch.cuda.Stream(seat.device)
        side.wait_stream(torch.cuda.current_stream(seat.device))
        given = [torch.full((200_001,), float(rank + turn)) for rank in range(seat.size)]
        with torch.cuda.stream(side):
            mine = torch.full((200_001,), -1.0, device=seat.device)
            if how == "sleep":
                torch.cuda._sleep(SLOW)
            else:
                product = left
                for _ in range(60):
                    product = (product @ left).clamp_(-1, 1)
                mine.add_(product[0, 0] * 0)
            mine.fill_(float(seat.rank + turn))
            apart = hvd.allreduce_async(mine, name=f"apart.{turn}", op=hvd.Sum)
            moved = hvd.allgather_async(mine[:1000], name=f"moved.{turn}")
            twice = hvd.synchronize(apart) * 2
            gathered = hvd.synchronize(moved) + 1
            hvd.allreduce_(mine, op=hvd.Sum, name=f"in place.{turn}")
            mine.mul_(3)
            results = [one.cpu() for one in (twice, gathered, mine)]
        assert_reduced(results[0] / 2, hvd.Sum, given)
        assert torch.equal(results[1] - 1, torch.cat([one[:1000] for one in given]))
        assert_reduced(results[2] / 3, hvd.Sum, given)


@check(cuda=True)
def two_streams_do_not_wait_for_each_other_s_operations(seat: Seat) -> None:
    """An operation that was submitted from one stream may be waited for on another."""
    given = inputs(seat, 100_003, torch.float32)
    one, other = torch.cuda.Stream(seat.device), torch.cuda.Stream(seat.device)
    with torch.cuda.stream(one):
        mine = given[seat.rank].to(seat.device)
        torch.cuda._sleep(SLOW)
        doubled = mine * 2
        handle = hvd.allreduce_async(doubled, name="crossing", op=hvd.Sum)
    with torch.cuda.stream(other):
        result = hvd.synchronize(handle)
        found = (result / 2).cpu()
    assert_reduced(found, hvd.Sum, given)


@check(cuda=True, each=("as produced", "compressed", "persisting"))
def gradients_of_a_bucket_on_several_streams(seat: Seat, how: str) -> None:
    """Hooks change each gradient on a stream of its own. Ranks reduce the changed gradients."""
    streams = [torch.cuda.Stream(seat.device) for _ in range(3)]
    parameters = [torch.nn.Parameter(torch.zeros(100_003, device=seat.device)) for _ in streams]
    compression = hvd.Compression.fp16 if how == "compressed" else hvd.Compression.none
    named = [(str(k), parameter) for k, parameter in enumerate(parameters)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named, compression=compression)
    slow = -1

    def change(k: int, parameter: torch.Tensor) -> None:
        if slow < 0:
            return
        streams[k].wait_stream(torch.cuda.current_stream(seat.device))
        torch.cuda.set_stream(streams[k])  # autograd restores its own after the hooks of this gradient
        if k == slow:
            torch.cuda._sleep(SLOW)
        assert parameter.grad is not None
        parameter.grad.add_(float(seat.rank * (k + 1)))

    for k, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(partial(change, k))
    others = sum(range(seat.size)) / seat.size
    for turn in range(-2, 3):  # in the first backward, ranks agree on the bucket; then gradients move to their places
        slow = turn
        optimizer.zero_grad(set_to_none=how != "persisting")
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
        found = [parameter.grad.cpu() for parameter in parameters if parameter.grad is not None]
        for k, gradient in enumerate(found):
            wanted = 1 + others * (k + 1) if turn >= 0 else 1.0
            torch.testing.assert_close(gradient, torch.full_like(gradient, wanted), rtol=1e-3, atol=0)
        optimizer.step()
        torch.cuda.synchronize()


@check(cuda=True)
def results_that_another_library_reads(seat: Seat) -> None:
    """A result is a tensor of torch: __dlpack__ lets the stream of another library wait for it, even one that never
    waits for others by itself, as CuPy's non-blocking streams."""
    given = inputs(seat, 100_003, torch.float32)
    mine = given[seat.rank].to(seat.device)
    torch.cuda._sleep(SLOW)
    result = hvd.allreduce(mine * 2, name="exported", op=hvd.Sum)
    theirs = torch.cuda.Stream(seat.device)
    capsule = result.__dlpack__(stream=theirs.cuda_stream)
    with torch.cuda.stream(theirs):
        found = (torch.utils.dlpack.from_dlpack(capsule) / 2).cpu()
    assert_reduced(found, hvd.Sum, given)


@check(cuda=True)
def inputs_that_are_overwritten_afterwards(seat: Seat) -> None:
    given = inputs(seat, 3_000_017, torch.float32)
    mine = seat.put(given[seat.rank])
    for turn in range(10):
        mine.copy_(given[seat.rank])
        result = hvd.synchronize(hvd.allreduce_async(mine, name=f"over.{turn}", op=hvd.Sum))
        mine.fill_(1e30)
        assert_reduced(result.cpu(), hvd.Sum, given)


@check()
def tensors_dropped_under_way(seat: Seat) -> None:
    """A tensor that the caller drops is kept until it was read and written; then the allocator gets it back."""
    sizes = [1000, 65_537, 400_003]
    for turn in range(5 if seat.gpu else 12):
        handles = []
        for k, size in enumerate(sizes):
            given = inputs(seat, size, torch.float32, seed=turn + k)
            if seat.device.type == "cuda":
                torch.cuda._sleep(SLOW // 20)
            mine = seat.put(given[seat.rank])
            handles.append((given, hvd.allreduce_async(mine * 2, name=f"drop.{k}", op=hvd.Sum)))
            handles.append((given, hvd.allgather_async(mine * 2, name=f"gather.{k}")))
            del mine
            # Take the allocator's free memory and overwrite it.
            junk = [torch.full((size,), 1e30, device=seat.device) for _ in range(4)]
            del junk
        gc.collect()
        for number, (given, handle) in enumerate(handles):
            result = hvd.synchronize(handle)
            junk = torch.full_like(result, 1e30)
            if number % 2 == 0:
                assert_reduced((result / 2).cpu(), hvd.Sum, given)
            else:
                assert torch.equal((result / 2).cpu(), torch.cat(given))
            del result, junk


@check()
def handles_that_nobody_waits_for(seat: Seat) -> None:
    """The tensors of an operation live until it is over."""
    for turn in range(10):
        mine = seat.put(values(seat.rank, 50_000, torch.float32))
        hvd.allreduce_async_(mine, name=f"forgotten.{turn}")
        del mine
        spoil = torch.full((50_000,), float(turn), device=seat.device)
        assert float(hvd.allreduce(spoil, name="kept").mean()) == turn


@check(least=4)
def many_sets_in_any_order(seat: Seat) -> None:
    """Each rank takes part in more sets than may wait on a GPU at once, and uses them in an order of its own."""
    members = [ranks for count in (2, 3) for ranks in combinations(range(seat.size), count)]
    sets = [(ranks, hvd.add_process_set(list(ranks))) for ranks in members]
    mine = [(ranks, own) for ranks, own in sets if seat.rank in ranks]
    for turn in range(4):
        handles = []
        for ranks, own in random.Random(100 * turn + seat.rank).sample(mine, len(mine)):
            tensor = seat.put(values(seat.rank, 70_001, torch.float32, seed=turn + len(ranks)))
            handle = hvd.allreduce_async(tensor, name=f"any.{turn}", op=hvd.Sum, process_set=own)
            handles.append((ranks, handle))
        for ranks, handle in handles:
            given = [values(rank, 70_001, torch.float32, seed=turn + len(ranks)) for rank in ranks]
            assert_reduced(hvd.synchronize(handle).cpu(), hvd.Sum, given)
    for _, own in sets:
        hvd.remove_process_set(own)


@check(cuda=True)
def results_outlive_the_pool(seat: Seat) -> None:
    """Results are in torch's own memory: they survive emptying its cache, and more operations."""
    given = inputs(seat, (40, 1000), torch.float32)
    kept = []
    for turn in range(20):
        kept.append(hvd.allgather(seat.put(given[seat.rank]) + turn))
        if turn % 5 == 4:
            torch.cuda.empty_cache()
    for turn, result in enumerate(kept):
        torch.testing.assert_close(result.cpu(), torch.cat(given) + turn)


@check(cuda=True)
def memory_does_not_grow(seat: Seat) -> None:
    mine = seat.put(values(seat.rank, 1_000_000, torch.float32))

    def work() -> int:
        for turn in range(30):
            hvd.allreduce(mine, name=f"grow.{turn % 3}")
            hvd.allgather(mine[:1000], name="grow")
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(seat.device)

    first = work()
    hvd.barrier()
    free = torch.cuda.mem_get_info(seat.device)[0]
    time.sleep(0.5)
    moves = torch.cuda.mem_get_info(seat.device)[0] != free
    if float(hvd.allreduce(torch.tensor(float(moves)), op=hvd.Max, name="moves")) > 0:
        raise LeftOut("other processes use the GPU's memory")
    for _ in range(3):
        assert work() <= first
    hvd.barrier()
    left = torch.cuda.mem_get_info(seat.device)[0]
    assert left > free - (64 << 20), f"{(free - left) >> 20} MiB of the GPU's memory have gone"


@check(cuda=True)
def a_graph_is_captured_while_operations_are_under_way(seat: Seat) -> None:
    """The other ranks come late, so this rank moves data and allocates in the middle of its capture."""
    static = torch.ones(1000, device=seat.device)
    assert float((static * 2).sum()) == 2000.0  # its kernels are loaded
    hvd.allreduce(static, op=hvd.Sum, name="first")  # as in rank_graphs.first_operations
    hvd.allgather(static, name="first")
    torch.cuda.synchronize()
    for turn in range(seat.size):
        count = 1_000_003 * (turn + 1)
        given = [torch.full((count,), float(rank)) for rank in range(seat.size)]
        mine = seat.put(given[seat.rank])
        if seat.rank != turn:
            time.sleep(0.3)
        reduced = hvd.allreduce_async(mine, name=f"captured.{turn}", op=hvd.Sum)
        gathered = hvd.allgather_async(mine, name=f"captured.{turn}")
        if seat.rank == turn:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                doubled = static * 2
                time.sleep(0.6)
                with pytest.raises(UsageError, match="while a CUDA graph is being captured"):
                    hvd.allreduce_async_(static, name="refused")
            graph.replay()
            assert float(doubled.sum()) == 2000.0
        assert_reduced(hvd.synchronize(reduced).cpu(), hvd.Sum, given)
        assert torch.equal(hvd.synchronize(gathered).cpu(), torch.cat(given))


@check(cuda=True)
def no_thread_waits_for_a_gpu(seat: Seat) -> None:
    """With IPC and NCCL, operations return to the threads while the first rank still computes its input."""
    mine = torch.zeros(300_007, device=seat.device)
    before = current().world.gpu_operations
    hvd.allreduce_(mine, name="ahead", op=hvd.Sum)  # this loads code, and ranks find their route
    torch.cuda.synchronize()
    if current().world.gpu_operations.get("STAGED", 0) > before.get("STAGED", 0):
        return
    hvd.barrier()
    if seat.rank == 0:
        torch.cuda._sleep(30 * SLOW)
    mine.fill_(seat.rank + 1.0)
    computed = torch.cuda.Event()
    computed.record()
    for turn in range(5):
        hvd.allreduce_(mine, name=f"ahead.{turn}", op=hvd.Sum)
    assert seat.rank > 0 or not computed.query()
    expected = sum(range(1, seat.size + 1)) * float(seat.size) ** 4
    assert mine.cpu().tolist() == [expected] * 300_007


@check(cuda=True)
def a_poll_tells_when_it_is_over(seat: Seat) -> None:
    """poll() is true only when the GPU has finished, not when the operation is on a queue."""
    mine = torch.zeros(1000, device=seat.device)
    torch.cuda._sleep(4 * SLOW)
    mine.fill_(seat.rank)
    handle = hvd.allreduce_async_(mine, name="poll", op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    free = torch.cuda.Stream(seat.device)
    with torch.cuda.stream(free):
        copied = mine.cpu()
    hvd.synchronize(handle)
    assert copied.tolist() == [sum(range(seat.size))] * 1000
