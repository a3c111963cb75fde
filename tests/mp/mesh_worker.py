"""A rank of a job that trains along one dimension of a device mesh: `mesh_worker.py PARTS STORE RANK SIZE [FOLDER]`.

PARTS, separated by commas: replicas (two replicas of a sharded model train as two whole models do), final_gradients,
unused_parameters, tensor_parallel, errors (what mesh= refuses), checkpoints (torch's, written to FOLDER), hooks (those
of hooks_worker.py).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mesh_models import batch, made, mesh_of, sharded, wrapped
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from algorithm_table import SHARDED, often

import sordino.torch as hvd
from sordino.algorithms import (
    ADPSGD,
    Algorithm,
    AllReduce,
    CaPS,
    Crossover,
    DiLoCo,
    ElasticAveraging,
    Layered,
    LocalSGD,
    PushSum,
    Traits,
)

ALGORITHMS = [
    AllReduce(bucket_bytes=64),
    Crossover(interval=2, segments="blocks"),
    LocalSGD(interval=2, start=1),
    *map(often, SHARDED.values()),
    PushSum(overlap=1),
    LocalSGD(interval=3),
    LocalSGD(interval=2, aggregate="gradients"),
]


def step_of(
    optimizer: hvd.DistributedOptimizer, model: torch.nn.Module, inputs: list[torch.Tensor], waits: Callable[[], Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accumulate the gradients of two batches, clip, and step. Return the loss of the last one and the norm."""
    optimizer.zero_grad()
    with waits():
        model(inputs[0]).square().mean().backward()
    loss = model(inputs[1]).square().mean()
    loss.backward()
    norm = optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    return loss.detach(), norm


def replicas(rank: int, size: int) -> None:
    shards = size // 2
    mesh, (replica, shard) = mesh_of(size), divmod(rank, shards)
    columns = [[place, place + shards] for place in range(shards)]
    sets = [hvd.add_process_set(column) for column in columns] if shards > 1 else [hvd.global_process_set]
    alike = sets[shard]
    for algorithm in ALGORITHMS if size > 2 else ALGORITHMS[:3]:
        whole, parts = made(), sharded(mesh["shard"])
        reference = wrapped(whole, algorithm=algorithm, process_set=alike)
        optimizer = wrapped(parts, algorithm=algorithm, mesh=mesh["replicate"])
        for step in range(5):
            inputs = [batch(replica, step, turn) for turn in range(2)]
            wanted, wanted_norm = step_of(reference, whole, inputs, reference.no_sync)
            own = [one.chunk(shards)[shard] for one in inputs]
            loss, norm = step_of(optimizer, parts, own, lambda: accumulating(parts))  # noqa: B023
            dist.all_reduce(loss, dist.ReduceOp.AVG, group=mesh["shard"].get_group())
            torch.testing.assert_close(loss, wanted, msg=f"{algorithm}, step {step}: {loss} {wanted}")
            torch.testing.assert_close(norm, wanted_norm)
        optimizer.flush()
        reference.flush()
        if isinstance(algorithm, LocalSGD):  # a torch checkpoint would give all ranks the outer values of one shard
            assert "outer" not in optimizer.state_dict()["sordino"]
        for (name, one), other in zip(parts.named_parameters(), whole.parameters()):
            torch.testing.assert_close(one.full_tensor(), other, msg=f"{algorithm}, {name}")
    for process_set in sets:
        hvd.remove_process_set(process_set)


@contextlib.contextmanager
def accumulating(model: Any) -> Any:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def final_gradients(rank: int, size: int) -> None:
    """Gradients are averages when backward() returns, also those that FSDP2 sets after backward."""
    mesh = mesh_of(size)
    layers = made()  # each layer waits for the end of backward by itself, and one parameter is no DTensor
    for layer in (layers.one, layers.two):
        fully_shard(layer, mesh=mesh["shard"])
    for model in (sharded(mesh["shard"]), layers):
        optimizer = wrapped(model, mesh=mesh["replicate"])
        for step in range(3):
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                model(batch(rank, step, 0)).square().mean().backward()
            assert optimizer.gradients_ready()
            for parameter in model.parameters():
                mine = parameter.grad.to_local() if isinstance(parameter, DTensor) else parameter.grad
                mean = mine.clone()
                dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh["replicate"].get_group())
                torch.testing.assert_close(mean, mine)
            if model is not layers:  # torch clips gradients of both kinds only separately
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()


def unused_parameters(rank: int, size: int) -> None:
    """A replica that has not used a parameter gets its average gradient as well, here with compression."""
    mesh, inputs = mesh_of(size), batch(0, 0, 0)
    model = sharded(mesh["shard"])
    model.scales = mesh.get_local_rank("replicate") == 0
    optimizer = wrapped(model, mesh=mesh["replicate"], compression=hvd.Compression.bf16)
    wanted = made()(inputs).sum().detach().reshape(1) / 2
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        gradient = model.scale.grad
        assert gradient.shape == (1,) and gradient.placements == model.scale.placements
        torch.testing.assert_close(gradient.full_tensor(), wanted, rtol=0.01, atol=0.01)


def tensor_parallel(rank: int, size: int) -> None:
    """Parameters of a tensor parallel plan, some of which are ordinary tensors, train as those of whole models do."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(size)
    parts, whole = made(), made()
    parallelize_module(parts, mesh["shard"], {"one": ColwiseParallel(), "two": RowwiseParallel()})
    replica, shard = mesh.get_coordinate() or (0, 0)
    columns = [hvd.add_process_set([place, place + size // 2]) for place in range(size // 2)]
    for algorithm in (AllReduce(), Crossover()):
        optimizer = wrapped(parts, mesh=mesh["replicate"], algorithm=algorithm)
        reference = wrapped(whole, process_set=columns[shard], algorithm=algorithm)
        for step in range(3):
            for model, one in ((parts, optimizer), (whole, reference)):
                one.zero_grad()
                model(batch(replica, step, 0)).square().mean().backward()
                one.step()
        for (name, one), other in zip(parts.named_parameters(), whole.parameters()):
            full = one.full_tensor() if isinstance(one, DTensor) else one
            torch.testing.assert_close(full, other, msg=f"{algorithm}, {name}")
        del optimizer, reference
    for process_set in columns:
        hvd.remove_process_set(process_set)


def refused(call: Callable[[], Any], *texts: str) -> None:
    try:
        call()
    except hvd.UsageError as error:
        assert all(text in str(error) for text in texts), (texts, error)
    else:
        raise AssertionError(f"{texts}: not refused")


def errors(rank: int, size: int) -> None:
    mesh = mesh_of(size)
    along = mesh["replicate"]
    model = sharded(mesh["shard"])
    refused(lambda: wrapped(model), "'scale' is a DTensor", "mesh=", "('shard',)")
    refused(lambda: wrapped(model, mesh=mesh), "2 dimensions", "'replicate'", 'device_mesh["replicate"]')
    refused(lambda: wrapped(model, mesh=0), "DeviceMesh", "not 0")
    refused(lambda: wrapped(model, mesh=along, process_set=hvd.ProcessSet([0])), "process_set=")
    refused(
        lambda: wrapped(sharded(mesh), mesh=along), "'scale'", "averages along it already", 'mesh=device_mesh["shard"]'
    )
    for algorithm, reason in (
        (LocalSGD(group_size=2), 'use exchange="allreduce"'),
        (ElasticAveraging(), "center"),
        (DiLoCo(overlap=2), "outer parameters"),
        (Layered(), "postpones steps"),
        (ADPSGD(), "pairs"),
        (CaPS(), "whole tensors"),
        (AllReduce(double_buffering=True), "whole gradients"),
        (Own(), "has not been written for them"),
    ):
        refused(lambda: wrapped(model, mesh=along, algorithm=algorithm), algorithm.label, reason, "'scale'")  # noqa: B023
    refused(lambda: wrapped(model, mesh=along, op=hvd.Adasum), "op=Adasum", "'scale'")
    refused(lambda: wrapped(model, mesh=along, check_finite=True), "check_finite=True")
    optimizer = wrapped(model, mesh=along)
    model(batch(rank, 0, 0)).sum().backward()
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0), torch.tensor(2.0)  # as GradScaler does
    refused(optimizer.step, "GradScaler", "bfloat16")
    optimizer.step()
    if size > 2:
        crossed = DeviceMesh("cpu", [rank, (rank + 1) % size], _init_backend=False)
        refused(lambda: wrapped(made(), mesh=crossed), f"each of the {size} ranks once")


@dataclass(frozen=True)
class Own(Algorithm):
    """An algorithm that is defined outside Sordino, whose traits say nothing about shards."""

    @property
    def traits(self) -> Traits:
        return Traits()

    def traffic(self, model: Any, nodes: Any) -> Any:
        raise NotImplementedError


def checkpoints(rank: int, size: int) -> None:
    """Save with 2 replicas, and load into as many replicas as there are ranks, where training continues."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = Path(sys.argv[5])
    for algorithm in (AllReduce(), Crossover(interval=2)):
        mesh, place = mesh_of(size), str(folder / algorithm.label)
        model = sharded(mesh["shard"])
        optimizer = wrapped(model, mesh=mesh["replicate"], algorithm=algorithm)
        for step in range(3):
            step_of(optimizer, model, [batch(rank, step, 0), batch(rank, step, 1)], lambda: accumulating(model))  # noqa: B023
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=place)
        other_mesh = mesh_of(size, size)
        other = sharded(other_mesh["shard"])
        loaded = wrapped(other, mesh=other_mesh["replicate"], algorithm=algorithm)
        into = dict(zip(("model", "optimizer"), get_state_dict(other, loaded)))
        dcp.load(into, checkpoint_id=place)
        set_state_dict(other, loaded, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
        if isinstance(algorithm, Crossover):
            assert loaded.state_dict()["sordino"]["steps"] == 3, loaded.state_dict()["sordino"]
            continue
        full = {name: one.full_tensor() for name, one in model.named_parameters()}
        if rank == 0:
            torch.save(full, folder / "full.pt")
        for name, one in other.named_parameters():
            assert torch.equal(one.full_tensor(), full[name])
        for trained, best in ((model, optimizer), (other, loaded)):
            step_of(best, trained, [batch(rank, 5, 0), batch(rank, 5, 1)], lambda: accumulating(trained))  # noqa: B023
        for one, wanted in zip(other.parameters(), model.parameters()):
            torch.testing.assert_close(one.full_tensor(), wanted.full_tensor())


def hooks(rank: int, size: int) -> None:
    import hooks_worker

    hooks_worker.all_parts()


def main() -> None:
    parts, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("sordino", init_method=f"file://{store}", rank=rank, world_size=size)
    for part in parts.split(","):
        globals()[part](rank, size)
    dist.destroy_process_group()
    print("well", rank, flush=True)


if __name__ == "__main__":
    main()
