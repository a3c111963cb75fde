"""A rank of a job with torch.distributed's backend "sordino": `distributed_worker.py PART STORE RANK SIZE [OUT]`.

Parts: operations (every operation against values computed here), training (losses of DDP, FSDP2, ... into OUT, with the
backend in SORDINO_TEST_BACKEND), lost (the last rank kills itself), failing (the last rank raises), mixed
(sordino.torch in the same world).
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path

import torch
import torch.distributed as dist

from sordino.distributed import register

warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renamed operations; both names are tested
Kinds = dist.ReduceOp
DEVICE = os.environ.get("SORDINO_TEST_DEVICE", "cpu")
BACKEND = os.environ.get("SORDINO_TEST_BACKEND", "sordino")
# With several backends, torch hides is_completed() of Sordino's Work, and the source of a message.
WORK_IS_WHOLE = "," not in BACKEND
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
ARITHMETIC = {
    "SUM": lambda rows: sum(rows[1:], rows[0]),
    "PRODUCT": lambda rows: reduce(torch.mul, rows),
    "MIN": lambda rows: reduce(torch.minimum, rows),
    "MAX": lambda rows: reduce(torch.maximum, rows),
}
BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * rank + count)
    return torch.randint(1, 5, (count,), generator=generator, device="cpu").to(DEVICE, dtype)


class Calls:
    """Calls operations of a group, blocking and asynchronous."""

    def __init__(self, group: object, ranks: list[int]) -> None:
        self.group, self.ranks = group, ranks
        self.rank, self.size = dist.get_rank(group), len(ranks)

    def both(self, call: Callable[..., object], check: Callable[[], None]) -> None:
        """Call an operation, blocking and then asynchronous. Check both results."""
        call(group=self.group)
        check()
        work = call(group=self.group, async_op=True)
        work.wait()
        assert (work.is_completed() and work.is_success()) if WORK_IS_WHOLE else work.get_future().done()
        check()


def same(found: torch.Tensor, wanted: torch.Tensor, what: object = "") -> None:
    assert found.dtype == wanted.dtype and torch.equal(found, wanted), (what, found, wanted)


def reductions(calls: Calls) -> None:
    size = calls.size
    for dtype in TYPES:
        for count in (0, 1, 7, 5000):
            given = [values(rank, count, dtype) for rank in calls.ranks]
            names = dict(ARITHMETIC)
            if not dtype.is_floating_point:
                names |= {name: partial(reduce, fold) for name, fold in BITWISE.items()}
            for name, fold in names.items():
                op, wanted = getattr(Kinds, name), fold(given)
                for how in (dist.all_reduce, partial(dist.reduce, dst=calls.ranks[size - 1])):
                    for waits in (True, False):
                        mine = given[calls.rank].clone()
                        work = how(mine, op=op, group=calls.group, async_op=not waits)
                        if work is not None:
                            work.wait()
                        root_only = how is not dist.all_reduce and calls.rank != size - 1
                        same(mine, given[calls.rank] if root_only else wanted, (name, dtype, count))
                rows = [values(rank, count * size, dtype) for rank in calls.ranks]
                part = fold([row.view(size, count)[calls.rank] for row in rows])
                for how in (dist.reduce_scatter_tensor, getattr(dist, "reduce_scatter_single", None)):
                    output = torch.empty(count, dtype=dtype)
                    if how is not None:
                        calls.both(partial(how, output, rows[calls.rank], op=op), lambda: same(output, part, name))  # noqa: B023
                parts = list(rows[calls.rank].view(size, count).clone().unbind())
                dist.reduce_scatter(output, parts, op=op, group=calls.group)
                same(output, part, name)
    floats = [torch.full((3, 4), rank + 1.0) for rank in calls.ranks]
    for op, factor in ((Kinds.AVG, 1 / size), (torch._C._distributed_c10d._make_nccl_premul_sum(0.5), 0.5)):
        turned = floats[calls.rank].t().contiguous().t()  # not row-major
        dist.all_reduce(turned, op=op, group=calls.group)
        torch.testing.assert_close(turned, sum(floats) * factor)
        output = torch.empty(4)
        dist.reduce_scatter_tensor(output, torch.ones(4 * size) * (calls.rank + 1), op=op, group=calls.group)
        torch.testing.assert_close(output, torch.full((4,), size * (size + 1) / 2 * factor))
    flags = torch.tensor([calls.rank == 0, calls.rank > 0, False])
    dist.all_reduce(flags, op=Kinds.MAX, group=calls.group)
    assert flags.tolist() == [True, size > 1, False]
    turned = torch.full((2,), complex(calls.rank, 1))
    dist.all_reduce(turned, group=calls.group)
    assert turned.tolist() == [complex(size * (size - 1) / 2, size)] * 2
    with dist._coalescing_manager(calls.group):
        for tensor in floats:
            dist.all_reduce(tensor, group=calls.group)
    for rank, tensor in zip(calls.ranks, floats):
        same(tensor, torch.full((3, 4), (rank + 1.0) * size))


def moves(calls: Calls) -> None:
    size, me = calls.size, calls.rank
    for dtype in TYPES:
        for count in (0, 1, 7, 5000):
            given = [values(rank, count, dtype) for rank in calls.ranks]
            mine, whole = given[me], torch.cat(given)
            for root in range(size):
                tensor = mine.clone()
                dist.broadcast(tensor, src=calls.ranks[root], group=calls.group)
                same(tensor, given[root])
                room = [torch.empty(count, dtype=dtype) for _ in range(size)] if me == root else None
                dist.gather(mine, room, dst=calls.ranks[root], group=calls.group)
                assert room is None or torch.equal(torch.cat(room), whole)
                output = torch.empty(count, dtype=dtype)
                dist.scatter(output, given if me == root else None, src=calls.ranks[root], group=calls.group)
                same(output, mine)
            for how in (dist.all_gather_into_tensor, getattr(dist, "all_gather_single", None)):
                output = torch.empty(size, count, dtype=dtype)
                if how is not None:
                    calls.both(partial(how, output, mine), lambda: same(output.view(-1), whole))  # noqa: B023
            strided = torch.empty(size, count, 2, dtype=dtype)[..., 0]
            dist.all_gather_into_tensor(strided, mine, group=calls.group)
            same(strided.reshape(-1), whole)
            room = [torch.empty(count, dtype=dtype) for _ in range(size)]
            calls.both(partial(dist.all_gather, room, mine), lambda: same(torch.cat(room), whole))  # noqa: B023
        uneven = [torch.empty(rank + 1, dtype=dtype) for rank in range(size)]
        dist.all_gather(uneven, values(9, me + 1, dtype), group=calls.group)
        same(torch.cat(uneven), torch.cat([values(9, rank + 1, dtype) for rank in range(size)]))
        # Rank a sends a + 2b rows to rank b.
        sent, taken = [me + 2 * to for to in range(size)], [by + 2 * me for by in range(size)]
        rows = [values(by, 3 * sum(by + 2 * to for to in range(size)), dtype).view(-1, 3) for by in range(size)]
        begins = [sum(by + 2 * to for to in range(me)) for by in range(size)]
        wanted = torch.cat([rows[by][begins[by] : begins[by] + taken[by]] for by in range(size)])
        output = torch.empty_like(wanted)
        calls.both(partial(dist.all_to_all_single, output, rows[me], taken, sent), lambda: same(output, wanted))  # noqa: B023
        outputs = [torch.empty(taken[by], 3, dtype=dtype) for by in range(size)]
        dist.all_to_all(outputs, list(rows[me].split(sent)), group=calls.group)
        same(torch.cat(outputs), wanted)
        even = torch.empty(size * 2, dtype=dtype)
        dist.all_to_all_single(even, values(me, size * 2, dtype), group=calls.group)
        same(even, torch.cat([values(by, size * 2, dtype).view(size, 2)[me] for by in range(size)]))


def messages(calls: Calls) -> None:
    size, me, ranks = calls.size, calls.rank, calls.ranks
    if size == 1:
        return
    after, before = (me + 1) % size, (me - 1) % size
    for dtype in TYPES:
        for count in (0, 1, 5000, 100_000):
            mine, room = values(me, count, dtype), torch.empty(count, dtype=dtype)
            sent = dist.isend(mine, ranks[after], group=calls.group, tag=3)
            assert dist.recv(room, ranks[before], group=calls.group, tag=3) == ranks[before]
            sent.wait()
            same(room, values(before, count, dtype))
    # Two tags, received in reverse order. Then messages from any rank.
    first, second = torch.empty(3), torch.empty(2, 2).t()
    ops = [
        dist.P2POp(dist.isend, torch.full((3,), float(me)), ranks[after], calls.group, tag=1),
        dist.P2POp(dist.isend, torch.full((2, 2), me + 0.5), ranks[after], calls.group, tag=2),
        dist.P2POp(dist.irecv, second, ranks[before], calls.group, tag=2),
        dist.P2POp(dist.irecv, first, ranks[before], calls.group, tag=1),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert first.tolist() == [before] * 3 and second.tolist() == [[before + 0.5] * 2] * 2
    if me > 0 and WORK_IS_WHOLE:
        dist.send(torch.full((2,), me), ranks[0], group=calls.group, tag=9)
    elif WORK_IS_WHOLE:
        room = torch.empty(2, dtype=torch.int64)
        found = {dist.recv(room, group=calls.group, tag=9): room.tolist() for _ in range(size - 1)}
        assert found == {ranks[other]: [other, other] for other in range(1, size)}
    text = [{"from": me}] if me == 0 else [None]
    if me == 0:
        dist.send_object_list(text, ranks[1], group=calls.group)
    elif me == 1:
        dist.recv_object_list(text, ranks[0], group=calls.group)
        assert text == [{"from": 0}]


def objects(calls: Calls) -> None:
    mine = {"rank": calls.rank, "text": "x" * 100 * calls.rank}
    found: list[object] = [None] * calls.size
    dist.all_gather_object(found, mine, group=calls.group)
    assert [one["rank"] for one in found] == list(range(calls.size))  # type: ignore[index]
    told = [mine] if calls.rank == 0 else [None]
    dist.broadcast_object_list(told, src=calls.ranks[0], group=calls.group)
    assert told == [{"rank": 0, "text": ""}]
    dist.barrier(group=calls.group)
    work = dist.barrier(group=calls.group, async_op=True)
    assert work.wait(timedelta(seconds=60))


def misuse(calls: Calls) -> None:
    """Wrong arguments raise ValueError on every rank, and the group stays usable."""
    size = calls.size
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: dist.all_gather_into_tensor(torch.empty(size * 2 + 1), torch.ones(2), calls.group), f"{size * 2}"),
        (lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(3), group=calls.group), "3 elements"),
        (lambda: dist.all_to_all_single(torch.empty(size + 1), torch.ones(size + 1), group=calls.group), "rows"),
        (lambda: dist.all_reduce(torch.ones(2), op=Kinds.BAND, group=calls.group), "bitwise"),
        (lambda: dist.all_gather_into_tensor(torch.empty(size).double(), torch.ones(1), calls.group), "float64"),
    ]
    for call, text in wrong[: len(wrong) if size > 1 else 2]:
        try:
            call()
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"{text}: was not refused")
    future = dist.all_reduce(torch.ones(2), group=calls.group, async_op=True).get_future()
    assert future.wait()[0].tolist() == [size, size]


def operations(rank: int, size: int) -> None:
    for calls in (Calls(None, list(range(size))), *subgroups(rank, size)):
        for part in (reductions, moves, messages, objects, misuse):
            part(calls)
    assert pickle.loads(pickle.dumps(dist.get_backend())) == BACKEND


def subgroups(rank: int, size: int) -> list[Calls]:
    """Return the groups of this rank, besides the group of all ranks.

    In order: two groups that all ranks make, one with its ranks in another order, and one that only its members make.
    The name of the last one has a number that must be equal on its members. Before torch 2.14 this is the number of
    groups that the rank belongs to, so this group comes first. Later it is the number of groups that the rank has made,
    also for the next groups.
    """
    if size < 3:
        return []
    rest, first, last, turned = [0, size - 1], list(range(size - 1)), list(range(1, size)), [1, 0]
    plans: list[tuple[list[int], dict[str, bool]]] = [(first, {}), (last, {})]
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:  # not in torch 2.11
        plans.append((turned, {"sort_ranks": False}))
    plans.insert(0 if torch.__version__ < (2, 14) else len(plans), (rest, {"use_local_synchronization": True}))
    made = []
    for ranks, how in plans:
        if ranks is rest and rank not in rest:
            continue
        group = dist.new_group(ranks, **how)
        if rank in ranks:
            made.append(Calls(group, ranks))
    return made


# ---- training --------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(torch.relu(self.two(torch.relu(self.one(x)))))


def wrapped(kind: str, model: Net, size: int) -> torch.nn.Module:
    """Return the model, distributed as `kind` says."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "ddp, static graph":
        return DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    if kind == "hsdp":
        return fully_shard(model, mesh=init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("replicate", "shard")))
    mesh = init_device_mesh(DEVICE, (size,))
    if kind == "tensor parallel":
        return parallelize_module(model, mesh, {"one": ColwiseParallel(), "two": RowwiseParallel()})
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "fsdp2, bfloat16" else MixedPrecisionPolicy()
    )
    for layer in (model.one, model.two):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


KINDS = {
    2: ["ddp", "ddp, static graph", "fsdp2", "fsdp2, bfloat16", "tensor parallel"],
    4: ["hsdp", "fsdp2"],
}


def training(rank: int, size: int) -> None:
    """Write the losses of each kind. Ranks accumulate over two batches, which differ between ranks except with
    tensor parallelism."""
    found = {}
    for kind in KINDS[size]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = Net()
        model = wrapped(kind, model.to(DEVICE), size)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), []
        for step in range(12):
            for turn in range(2):
                seed = 1000 * step + 10 * turn + (kind != "tensor parallel") * rank
                generator = torch.Generator("cpu").manual_seed(seed)
                x = torch.randn(8, 16, generator=generator, device="cpu").to(DEVICE)
                loss = (model(x) ** 2).mean()
                loss.backward()
            if kind != "tensor parallel":  # torch does not clip DTensors and ordinary tensors together
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total, op=Kinds.SUM)
            losses.append(float(total))
        found[kind] = losses
    if rank == 0:
        Path(sys.argv[5]).write_text(json.dumps(found))


# ---- others ----------------------------------------------------------------------------------------------------------


def mixed(rank: int, size: int) -> None:
    """Both interfaces share one world."""
    import sordino.torch as hvd

    assert hvd.is_initialized() and (hvd.rank(), hvd.size()) == (rank, size)
    for turn in range(3):
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name=f"{turn}").tolist() == [size] * 3
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size] * 3


def failing(rank: int, size: int) -> None:
    """The last rank raises an error of the script, while the others wait in a barrier."""
    if rank == size - 1:
        raise RuntimeError("an error of the script")
    dist.barrier()


def lost(rank: int, size: int) -> None:
    """Kill the last rank. On the others, print the error, and the seconds from the call to the error."""
    tensor = torch.ones(1000)
    for turn in range(10_000):
        if turn == 50 and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            dist.all_reduce(tensor.fill_(1.0))
        except dist.DistBackendError as error:
            print(json.dumps({"rank": rank, "error": str(error), "seconds": time.monotonic() - begin}), flush=True)
            os._exit(0)


def main() -> None:
    part, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    register()  # torch does that only if the package is installed, not copied to a folder
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_default_device(DEVICE)
    if part == "mixed" and sys.argv[5] == "first":
        import sordino.torch as hvd

        hvd.init(store=dist.FileStore(store + ".hvd", size), rank=rank, world_size=size)
    dist.init_process_group(BACKEND, init_method=f"file://{store}", rank=rank, world_size=size)
    globals()[part](rank, size)
    dist.destroy_process_group()
    if part == "mixed":
        import sordino.torch as hvd

        assert hvd.is_initialized() == (sys.argv[5] == "first")
        hvd.shutdown()
    print("well", rank, flush=True)


if __name__ == "__main__":
    main()
