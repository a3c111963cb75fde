"""A rank of a job about process groups of torch.distributed: `group_worker.py PART STORE RANK SIZE PORT`.

Parts: groups (what groups can do besides the common operations; how they end and begin again; the time limits of groups
and calls), missing (a rank never comes), combined (a group of several backends).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import sordino.distributed  # noqa: F401  # registers the backend

SOON = timedelta(seconds=float(os.environ.get("SORDINO_TEST_SOON_S", "1")))


stores: list[Any] = []  # kept open, as a launcher keeps it: each life of the group meets at the same store


def begin(rank: int, size: int, **options: Any) -> None:
    dist.init_process_group("sordino", f"tcp://127.0.0.1:{sys.argv[5]}", rank=rank, world_size=size, **options)
    stores.append(distributed_c10d._get_default_store())


def error_of(call: Callable[[], object], kind: type[Exception] = dist.DistBackendError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("no error")


# ---- groups ----------------------------------------------------------------------------------------------------------


def sparse(rank: int, size: int) -> None:
    """Rank r has entries in the rows 0 to r, so row r gets one from each of the ranks r, r + 1, ..."""
    for values, op, share in (((1.0, 2.0), dist.ReduceOp.SUM, 1), ((1, 2), dist.ReduceOp.SUM, 1),
                              ((1.0, 2.0), dist.ReduceOp.AVG, size)):  # fmt: skip
        indices = torch.arange(rank + 1).unsqueeze(0)
        tensor = torch.sparse_coo_tensor(indices, torch.tensor([values] * (rank + 1)), (size, 2))
        work = dist.all_reduce(tensor, op, async_op=True)
        work.wait()
        wanted = [[value * (size - row) / share for value in values] for row in range(size)]
        torch.testing.assert_close(tensor.to_dense(), torch.tensor(wanted, dtype=tensor.dtype))
    assert "SUM or AVG" in error_of(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX), ValueError)


def coalesced(rank: int, size: int) -> None:
    sources = [torch.full((2,), rank + 1.0), torch.full((3,), 10.0 * rank)]
    outputs = [torch.empty(2 * size), torch.empty(3 * size)]
    with dist._coalescing_manager():
        for output, source in zip(outputs, sources):
            dist.all_gather_into_tensor(output, source)
    for output, value in zip(outputs, (lambda one: one + 1.0, lambda one: 10.0 * one)):
        assert output.view(size, -1).tolist() == [[value(one)] * (output.numel() // size) for one in range(size)]
    parts = [torch.empty(1), torch.empty(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for part in parts:
            dist.reduce_scatter_tensor(part, torch.ones(part.numel() * size) * (rank + 1))
    manager.wait()
    assert [part.tolist() for part in parts] == [[size * (size + 1) / 2], [size * (size + 1) / 2] * 2]
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, sources)
    assert [[tensor[0].item() for tensor in tensors] for tensors in lists] == [[1 + r, 10.0 * r] for r in range(size)]


def named_by_the_group(rank: int, size: int) -> None:
    """Calls on the group itself, as communication hooks of DDP make them: without options, which means asynchronous."""
    group = dist.group.WORLD
    tensor = torch.ones(3)
    assert group.allreduce([tensor]).get_future().wait()[0].tolist() == [size] * 3
    group.barrier().wait()
    half = group.split_group([size - 1, 0], group_name="ends", timeout=timedelta(seconds=50))
    assert (half is None) == (rank not in (0, size - 1))
    if half is not None:
        assert (half.rank(), half.size(), half.group_name) == (1 if rank == 0 else 0, 2, "ends")
        tensor = torch.full((2,), float(rank))
        half.allreduce([tensor]).wait()
        assert tensor.tolist() == [size - 1.0] * 2
        half.shutdown()
    for _ in range(2):  # a group may be made again with the same name
        again = group.split_group([0, size - 1])
        if again is not None:
            tensor = torch.ones(2)
            again.allreduce([tensor]).wait()
            assert tensor.tolist() == [2.0] * 2
            again.shutdown()
    assert group._get_backend(torch.device("cpu")).supports_splitting is False


def of_different_ranks(rank: int, size: int) -> None:
    """Each rank makes a group of only itself, at the same time."""
    group = dist.new_group([rank])
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [rank] * 2
    dist.destroy_process_group(group)


def of_another_backend(rank: int, size: int) -> None:
    group = dist.new_group(backend="gloo")
    assert dist.get_backend(group) == "gloo" and type(group) is dist.ProcessGroup
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [size] * 2
    dist.destroy_process_group(group)


def monitored(rank: int, size: int) -> None:
    """The error of a monitored barrier names the ranks that missed it, and the group remains usable."""
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=60))
    if rank == 0:
        text = error_of(lambda: group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True), RuntimeError)
        names = "Rank 1" if size == 2 else f"Ranks {', '.join(map(str, range(1, size)))}"
        assert text == f"{names} failed to pass monitoredBarrier in 200 ms", text
    dist.barrier()
    if rank > 0:
        text = error_of(lambda: group.monitored_barrier(timedelta(seconds=60)), RuntimeError)
        assert f"Rank {rank} successfully reached" in text and "failed to pass" in text, text
    dist.barrier()


def aborted(rank: int, size: int) -> None:
    """Abort a group while another thread of this rank, and the other ranks, wait in it."""
    if rank > 0:
        text = error_of(dist.barrier)
        assert "rank 0" in text and "aborted" in text, text
        dist.destroy_process_group()
        return
    texts: list[str] = []
    tensor = torch.ones(2)
    waiting = threading.Thread(target=lambda: texts.append(error_of(lambda: dist.recv(tensor, 1, tag=77))))
    waiting.start()
    time.sleep(0.2)
    distributed_c10d._abort_process_group()
    waiting.join(60)
    assert len(texts) == 1 and "aborted" in texts[0], texts


def groups(rank: int, size: int) -> None:
    begin(rank, size)
    for part in (sparse, coalesced, named_by_the_group, of_different_ranks, of_another_backend, monitored, aborted):
        part(rank, size)
    # The store still has keys of earlier lives, also of groups with the same names but other ranks.
    for ranks in ([0, 1], [size - 2, size - 1]):
        begin(rank, size, timeout=timedelta(seconds=50))
        group = dist.new_group(ranks)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        if rank in ranks:
            dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2 * size if rank in ranks else size] * 2
        dist.destroy_process_group()
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    text = error_of(lambda: dist.init_process_group("sordino", timeout=timedelta(0), **alone), ValueError)
    assert "above 0 s, not 0 s" in text, text
    backends = "cpu:sordino,cuda:gloo"
    text = error_of(lambda: dist.init_process_group(backends, **alone), ValueError)
    assert backends in text, text
    assert ("with 2.14 or newer" if torch.__version__ < (2, 14) else "TORCH_DISTRIBUTED_DEBUG=DETAIL") in text, text
    timeouts(rank, size)


# ---- time limits -----------------------------------------------------------------------------------------------------


def barrier_within(seconds: float, group: Any, waits: bool) -> Any:
    """Call the barrier as torch 2.13 and newer do for `dist.barrier(timeout=...)`."""
    options = distributed_c10d.BarrierOptions()
    options.timeout, options.asyncOp = timedelta(seconds=seconds), not waits
    return group.barrier(options)


def timeouts(rank: int, size: int) -> None:
    begin(rank, size)
    group = dist.new_group(timeout=SOON)
    calm = dist.new_group(timeout=timedelta(seconds=1000))
    if rank == 0:  # the time limit of a call ends only this call
        assert "0.2 s" in error_of(lambda: barrier_within(0.2, dist.group.WORLD, waits=True))
        assert "0.2 s" in error_of(barrier_within(0.2, calm, waits=False).wait)
        stores[0].set("over", b"")
    else:
        stores[0].wait(["over"])
        dist.barrier()
        dist.barrier(calm)
    dist.barrier()
    dist.barrier(group)
    others = ("ranks " if size > 2 else "rank ") + ", ".join(map(str, range(1, size)))
    began = time.monotonic()
    text = error_of(lambda: dist.barrier(group if rank == 0 else calm))
    print("took", time.monotonic() - began, flush=True)
    if rank == 0 or torch.__version__ >= (2, 13):
        assert f"timeout of its process set ({SOON.total_seconds():g} s)" in text and f"for {others}" in text, text
    else:  # each group is a world of its own, and rank 0 leaves the other one after its error
        assert "rank 0, which has shut down" in text, text
    dist.destroy_process_group()


def combined(rank: int, size: int) -> None:
    """A group that has another backend for other devices."""
    place = {"store": dist.FileStore(sys.argv[2], size), "rank": rank, "world_size": size}
    dist.init_process_group("cpu:sordino,cuda:gloo", **place)
    group, tensor = dist.group.WORLD, torch.ones(2)
    group.monitored_barrier(timedelta(seconds=60))
    ranks = [0, 1] if rank < 2 else [2]
    part = group.split_group(ranks, group_name=f"of {ranks}", timeout=timedelta(seconds=60))
    part.allreduce([tensor]).wait()
    assert tensor.tolist() == [len(ranks)] * 2
    if rank == 2:
        assert "not in the new group [0, 1]" in error_of(lambda: group.split_group([0, 1], group_name="x"), ValueError)
    dist.barrier()
    group.set_timeout(SOON)
    if rank == 0:
        text = error_of(lambda: dist.all_reduce(tensor))
        assert f"timeout of its process set ({SOON.total_seconds():g} s)" in text, text
        place["store"].set("over", b"")
    place["store"].wait(["over"])
    dist.destroy_process_group()


def missing(rank: int, size: int) -> None:
    """Only rank 0 comes. With a FileStore, unlike with a TCPStore, it gets as far as this backend."""
    if rank == 0:
        place = {"store": dist.FileStore(sys.argv[2], size), "rank": rank, "world_size": size}
        text = error_of(lambda: dist.init_process_group("sordino", timeout=SOON, **place))
        assert "rank 0 waits for rank 1" in text and f"{SOON.total_seconds():g} s (the timeout of the" in text, text


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](int(sys.argv[3]), int(sys.argv[4]))
    print("well", sys.argv[3], flush=True)
