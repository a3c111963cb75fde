"""A rank of a job whose buffers of FSDP2 and DDP are in shared memory: `shared_worker.py PART STORE RANK SIZE`.

Values are compared bit by bit with those of the same job in ordinary memory.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from sordino.distributed import hooks, shared_memory
from sordino.distributed.operations import Operations
from sordino.errors import TransportError, UsageError

WIDTH = 192  # a layer has 145 KiB, of which each of four ranks has more than 32 KiB
MANY = 25  # steps


def mappings() -> int:
    """Return the number of this process's mappings of shared memory, its own and those of its peers' memory."""
    return sum(
        "memfd:sordino" in line or "/torch_" in line for line in Path("/proc/self/maps").read_text().splitlines()
    )


def own_files() -> int:
    """Return the number of open files behind this process's own shared memory."""
    files = Path("/proc/self/fd")
    return sum("memfd:sordino" in os.readlink(file) for file in files.iterdir() if file.is_symlink())


def operations(group: Any = None) -> Operations:
    return hooks._operations_of(group)


def is_shared(tensor: torch.Tensor, group: Any = None) -> bool:
    world = operations(group)._place.context.world
    return world.in_shared_memory(tensor.data_ptr(), tensor.nbytes)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = torch.nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Inputs(Dataset[torch.Tensor]):
    """Inputs of the steps, made by a forked process if the loader has workers."""

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, step: int) -> torch.Tensor:
        return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def train(model: torch.nn.Module, steps: int, workers: int = 0, after: Callable[[int], None] | None = None) -> Any:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    context = "fork" if workers else None
    loader = iter(DataLoader(Inputs(), batch_size=None, num_workers=workers, multiprocessing_context=context))
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 3 != 1)
        loss = model(next(loader)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if after is not None:
            after(step)
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def require_equal(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0], (found[0], wanted[0])
    for mine, others in zip(found[1], wanted[1]):
        local, expected = (getattr(tensor, "_local_tensor", tensor) for tensor in (mine, others))
        assert torch.equal(local, expected)


@contextmanager
def watched(name: str) -> Iterator[list[bool]]:
    """Collect, for each call of an operation in this process, whether its input is in shared memory."""
    found: list[bool] = []
    usual = getattr(Operations, name)

    def operation(self: Operations, *arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())[-2]  # before the options
        tensor = given if isinstance(given, torch.Tensor) else given[0]
        if tensor.is_floating_point():
            found.append(is_shared(tensor))
        return usual(self, *arguments, **named)

    setattr(Operations, name, operation)
    try:
        yield found
    finally:
        setattr(Operations, name, usual)


@contextmanager
def counted_arenas(made: list[int]) -> Iterator[None]:
    """Note the bytes of each segment that a pool makes."""
    usual = shared_memory.Arena

    def arena(world: Any, layout: Any) -> Any:
        made.append(layout.bytes)
        return usual(world, layout)

    shared_memory.Arena = arena  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        shared_memory.Arena = usual  # type: ignore[misc]


def fsdp(allocates: bool, mesh: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = Net()
    del model.unused
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for layer in model.layers:
        layer.set_allocate_memory_from_process_group_for_comm(allocates)
    return model


def fsdp_buffers() -> None:
    """FSDP2 gives the same values with shared memory, which it reuses, with forked workers and along two dimensions."""
    size = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (size,))]
    if size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        wanted = train(fsdp(False, mesh), 6)
        with watched("all_gather_single") as gathers, watched("reduce_scatter_single") as scatters:
            require_equal(train(fsdp(True, mesh), 6, workers=1), wanted)
        assert len(gathers) >= 18 and all(gathers), gathers
        assert len(scatters) >= 18 and all(scatters), scatters
        counts, made = [], []
        memory = operations(mesh.get_group(mesh.ndim - 1)).memory
        with counted_arenas(made):
            train(fsdp(True, mesh), MANY, after=lambda _: counts.append((sum(memory.segments), len(made), mappings())))  # noqa: B023
        assert counts[5][0] > 0 and set(counts[5:]) == {counts[5]}, counts


def ddp(register: Callable[[DistributedDataParallel], None], views: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        Net(), gradient_as_bucket_view=views, bucket_cap_mb=0.2, find_unused_parameters=True
    )
    register(model)
    return model


def ddp_rebuilt(register: Callable[[DistributedDataParallel], None], views: bool) -> torch.nn.Module:
    """Return a model whose buckets DDP rebuilds after the first step."""
    torch.manual_seed(0)
    net = Net()
    del net.unused
    model = DistributedDataParallel(net, gradient_as_bucket_view=views, bucket_cap_mb=0.2)
    register(model)
    return model


def ordinary(model: DistributedDataParallel) -> None:
    """Register a hook with the same reduction in ordinary memory."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with classes
        work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)


def require_released(state: hooks.SharedBuckets) -> None:
    """Check that no bucket is kept. The thread that completes futures may hold the last one for another moment."""
    assert state._storages is not None
    limit = time.monotonic() + 60
    while state._storages.count > 0:
        assert time.monotonic() < limit, f"{state._storages.count} buckets are kept"
        time.sleep(0.01)


def ddp_buckets() -> None:
    """DDP gives the same values with buckets in shared memory, which are released when DDP has others."""
    for make in (ddp, ddp_rebuilt):
        for views in (False, True):
            wanted = train(make(ordinary, views), 6)
            state = hooks.SharedBuckets()
            with watched("allreduce") as found:
                model = make(lambda model: model.register_comm_hook(state, hooks.average), views)  # noqa: B023
                require_equal(train(model, 6, workers=1), wanted)
            assert len(found) > 10 and all(found), found
            if dist.get_world_size() == 2:  # a division by 2 is exact
                require_equal(train(make(lambda _: None, views), 6), wanted)
            counts = []
            train(model, MANY, after=lambda _: counts.append((state._storages.count, mappings())))  # noqa: B023
            # A late rank keeps buckets a moment longer, so a peer may need additional ones once, but not in each step.
            kept, mapped = map(max, zip(*counts))
            assert 1 < kept <= 2 * counts[5][0] and mapped <= 2 * counts[5][1] < counts[5][1] + MANY, counts
            gradient = model.module.layers[0].weight.grad
            assert is_shared(gradient) == views
            del model, gradient
            gc.collect()
            require_released(state)


def freed_in_flight() -> None:
    """A tensor that is freed while an operation uses it keeps its memory until the operation is over."""
    group, count = operations(), 100_000
    me, memory = dist.get_rank(), operations().memory
    before = memory.segments
    tensor = group.allocate_tensor(count, dtype=torch.float32, device=torch.device("cpu"))
    tensor.fill_(me + 1.0)
    held, address = sum(memory.segments), tensor.data_ptr()
    if me == 0:
        work = dist.all_reduce(tensor, async_op=True)
        del tensor
        other = group.allocate_tensor(count, dtype=torch.float32, device="cpu")
        assert other.data_ptr() != address
        other.fill_(7)
        dist.send(torch.ones(1), 1)
        work.wait()
        assert bool((other == 7).all())
        del work, other
    else:
        if me == 1:
            dist.recv(torch.ones(1), 0)
        dist.all_reduce(tensor)
        size = dist.get_world_size()
        assert bool((tensor == size * (size + 1) / 2).all())
        del tensor
    dist.barrier()
    assert memory.segments[0] == before[0], (memory.segments, before)
    assert sum(memory.segments) <= held + 1
    again = group.allocate_tensor(count, dtype=torch.float32, device="cpu")
    assert sum(memory.segments) <= held + 1
    del again


def forked() -> None:
    """A forked child gets no shared memory, and its end does not change the parent's."""
    group = operations()
    tensor = group.allocate_tensor(50_000, dtype=torch.float64, device="cpu").fill_(2.0)
    child = os.fork()
    if child == 0:
        try:
            group.allocate_tensor(50_000, dtype=torch.float64, device="cpu")
        except ValueError as error:
            del tensor, group
            gc.collect()
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(tensor)
    assert bool((tensor == 2.0 * dist.get_world_size()).all()) and is_shared(tensor)


def two_groups() -> None:
    """Each group has its own pool. A tensor of one group works in the other group, also after the first group has
    ended."""
    group = dist.new_group()
    first, second = operations(), operations(group)
    tensors = [one.allocate_tensor(70_000, dtype=torch.int32, device="cpu") for one in (first, second)]
    for used in (None, group):
        for tensor in tensors:
            dist.all_reduce(tensor.fill_(1), group=used)
            assert bool((tensor == dist.get_world_size()).all())
    assert second.memory is not first.memory and second.memory.segments == (1, 0)
    dist.destroy_process_group(group)
    refused(lambda: second.allocate_tensor(70_000, dtype=torch.int32, device="cpu"), ValueError, "is destroyed")
    dist.all_reduce(tensors[1].fill_(1))
    assert bool((tensors[1] == dist.get_world_size()).all())


def refused(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{text}: not refused")


def errors() -> None:
    group = operations()
    assert group.supports_tensor_alloc(torch.device("cpu")) and not group.supports_tensor_alloc(torch.device("cuda"))
    assert not is_shared(group.allocate_tensor(1000, dtype=torch.uint8, device="cpu"))
    for size, device in ((-1, "cpu"), (10, "cuda"), (10, "meta")):
        refused(lambda: group.allocate_tensor(size, dtype=torch.uint8, device=device), ValueError, f"({size}, device")  # noqa: B023
    refused(lambda: group.allocate_tensor(1 << 50, dtype=torch.uint8, device="cpu"), dist.DistBackendError, "no room")
    gloo = dist.new_group(backend="gloo")
    refused(lambda: hooks.SharedBuckets(gloo), UsageError, "has the backend gloo")
    usual = torch.UntypedStorage._share_fd_cpu_

    def full(storage: Any) -> Any:
        raise RuntimeError("No space left on device")

    torch.UntypedStorage._share_fd_cpu_ = full  # type: ignore[method-assign]
    model = ddp_rebuilt(lambda model: model.register_comm_hook(hooks.SharedBuckets(), hooks.average), False)
    try:
        refused(lambda: train(model, 1), TransportError, "no room for a bucket")
    finally:
        torch.UntypedStorage._share_fd_cpu_ = usual  # type: ignore[method-assign]
    dist.barrier()


def main() -> None:
    part, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    backend = os.environ.get("SORDINO_TEST_BACKEND", "sordino")
    parts = [ddp_buckets, freed_in_flight, forked, two_groups, errors]
    if torch.__version__ >= (2, 13):  # FSDP2 of earlier versions does not ask for memory
        parts.append(fsdp_buffers)
    if part != "all":
        parts = [globals()[part]]
    for life in range(2):
        dist.init_process_group(backend, init_method=f"file://{store}.{life}", rank=rank, world_size=size)
        kept = operations().allocate_tensor(60_000, dtype=torch.float32, device="cpu").fill_(rank)
        for one in parts if life == 0 else (freed_in_flight,):
            one()
        gc.collect()
        memory, files = operations().memory, own_files()
        segments = sum(memory.segments)
        assert segments > 0
        dist.destroy_process_group()
        assert bool((kept == rank).all())  # a tensor keeps its memory after the end of its group
        del kept
        assert own_files() <= files - segments
    print("well", rank, flush=True)


if __name__ == "__main__":
    main()
