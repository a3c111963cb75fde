"""Training along one dimension of a device mesh: `DistributedOptimizer(..., mesh=device_mesh["replicate"])`.

FSDP2 and tensor parallelism shard parameters over some dimensions of a device mesh. The ranks along another dimension
have the same shards of different replicas of the model. An algorithm runs among these ranks, on their local shards:

              dimension "shard": torch
              rank 0: shard 0   rank 1: shard 1     replica 0
                     |                 |            dimension "replicate": Sordino
              rank 2: shard 0   rank 3: shard 1     replica 1

All ranks of a replica choose the same peers and times of exchanges, because these choices follow from the settings, the
number of steps and the replica's place along the dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from sordino.errors import UsageError
from sordino.runtime.collectives.objects import allgather_object
from sordino.runtime.context import current
from sordino.runtime.exchange.groups import part_of
from sordino.runtime.gradients.options import Options
from sordino.runtime.local_shards import is_dtensor, local_shard
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.torch.start import INSTEAD

_EXAMPLE = 'fully_shard(model, mesh=device_mesh["shard"]) and DistributedOptimizer(..., mesh=device_mesh["replicate"])'


def ranks_along(mesh: Any, process_set: ProcessSet = global_process_set) -> ProcessSet:
    """Return the process set of this rank and the others along a dimension of a mesh. Collective over all ranks.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` with one dimension.
        process_set: the argument of `DistributedOptimizer`, which cannot be combined with `mesh`.

    Raises:
        UsageError: `mesh` is no such mesh, or does not belong to a mesh of all ranks; or it is combined with
            `process_set` or on_peer_lost="continue"; or torch.distributed numbers the ranks differently.
    """
    from torch.distributed.device_mesh import DeviceMesh

    context = current()
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f'mesh= must be a dimension of a DeviceMesh, such as device_mesh["replicate"], not {mesh!r}')
    if mesh.ndim != 1:
        names = list(mesh.mesh_dim_names or [])
        name = names[0] if names else "replicate"
        raise UsageError(
            f"mesh= has {mesh.ndim} dimensions{f', {names}' if names else ''}: choose the one along which replicas of "
            f'the model are, such as device_mesh["{name}"]'
        )
    if process_set is not global_process_set:
        raise UsageError("mesh= and process_set= both choose the ranks that train together: give one of them")
    if context.survives_losses:
        raise UsageError(f"mesh=: on_peer_lost='continue' cannot replace the shards of a lost rank; {INSTEAD}")
    place = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if place != (context.rank, context.size):
        raise UsageError(
            f"mesh=: this is rank {place[0]} of {place[1]} in torch.distributed, but rank {context.rank} of "
            f"{context.size} in sordino.torch: start both with the same ranks"
        )
    rows = allgather_object(tuple(mesh.mesh.flatten().tolist()), name=context.names.plan("mesh", 0))
    parts = list(dict.fromkeys(rows))
    covered = sorted(rank for part in parts for rank in part)
    if covered != list(range(context.size)) or any(rank not in row for rank, row in enumerate(rows)):
        raise UsageError(
            f"mesh=: the ranks gave dimensions with the ranks {', '.join(map(str, parts))}, which do not contain each "
            f"of the {context.size} ranks once. Give the same dimension of one mesh of all ranks, on all ranks"
        )
    if len(parts) == 1:
        return global_process_set
    return part_of(context, global_process_set, (f"mesh {parts}", 0), [list(part) for part in parts])


def local_shards(parameters: Sequence[torch.Tensor], names: Sequence[str], options: Options) -> Sequence[torch.Tensor]:
    """Return the parameters, with a local shard for each that is a DTensor.

    Raises:
        UsageError: there are DTensors, but no `mesh=`; or a DTensor is distributed along `mesh=`, too; or the algorithm
            or an option needs whole parameters.
    """
    sharded = [(name, parameter) for name, parameter in zip(names, parameters) if is_dtensor(parameter)]
    if not sharded:
        return parameters
    _check(options, *sharded[0])
    ranks = set(options.process_set.ranks or [])
    for name, parameter in sharded:
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        if len(ranks.intersection(mesh.mesh.flatten().tolist())) > 1:
            raise UsageError(
                f"parameter '{name}' is distributed over {_described(mesh)}, which contains the dimension of mesh=: "
                f"torch averages along it already. Distribute it over the other dimensions only: {_EXAMPLE}"
            )
    return [local_shard(parameter) if is_dtensor(parameter) else parameter for parameter in parameters]


def _check(options: Options, name: str, parameter: Any) -> None:
    """Raise UsageError if DTensors cannot be trained with these options. `parameter` is one of them."""
    if not options.mesh:
        raise UsageError(
            f"parameter '{name}' is a DTensor, which torch distributes over {_described(parameter.device_mesh)}: "
            "DistributedOptimizer needs mesh=, the dimension of the device mesh along which replicas of the model are: "
            f"{_EXAMPLE}. Without replicas, use the unwrapped optimizer: torch itself averages the gradients of shards"
        )
    what, reason = options.algorithm.label, options.algorithm.traits.whole_parameters
    if options.adasum:
        what, reason = "op=Adasum", "its weights follow from scalar products of whole tensors"
    elif options.check_finite:
        what, reason = "check_finite=True", "ranks with finite shards would take a step that others refuse"
    if reason is not None:
        raise UsageError(
            f"{what} cannot train parameters that are sharded over a device mesh, such as '{name}': {reason}"
        )


def _described(mesh: Any) -> str:
    """Return a device mesh as text: the names of its dimensions, or else its shape."""
    return f"the mesh {mesh.mesh_dim_names or tuple(mesh.mesh.shape)}"
