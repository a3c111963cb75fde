"""The names that scripts use from `horovod.torch` 0.28.1 and its modules exist here, too."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import get_args

import pytest
import torch

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import AlgorithmName, registry
from sordino.errors import NoSuchAttribute
from sordino.torch import sync_batch_norm

PUBLIC = {
    "": """
        Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum
        SyncBatchNorm add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async
        allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_
        broadcast_object broadcast_optimizer_state broadcast_parameters ccl_built check_extension compression cross_rank
        cross_size cuda_built ddl_built elastic functions global_process_set gloo_built gloo_enabled grouped_allgather
        grouped_allgather_async grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_
        grouped_reducescatter grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built
        mpi_enabled mpi_lib_v2 mpi_ops mpi_threads_supported nccl_built optimizer poll rank reducescatter
        reducescatter_async remove_process_set rocm_built shutdown size sparse_allreduce_async start_timeline
        stop_timeline sync_batch_norm synchronize
    """,
    "compression": "Compression Compressor FP16Compressor NoneCompressor",
    "elastic": "ElasticSampler TorchState init run run_fn sampler shutdown state",
    "elastic.sampler": "ElasticSampler",
    "elastic.state": """
        ModelStateHandler ObjectState OptimizerStateHandler SamplerStateHandler StateHandler TorchState
        get_handler_registry set_handler_registry
    """,
    "functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "mpi_ops": """
        allgather allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier
        broadcast broadcast_ broadcast_async broadcast_async_ grouped_allgather grouped_allgather_async
        grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
        grouped_reducescatter_async init is_homogeneous is_initialized join mpi_lib num_rank_is_power_2 poll rank
        reducescatter reducescatter_async rocm_built shutdown size sparse_allreduce_async synchronize
    """,
    "optimizer": "DistributedOptimizer",
    "sync_batch_norm": "SyncBatchNorm",
}

METHODS = {
    "elastic.ElasticSampler": """
        epoch load_state_dict num_replicas num_samples processed_indices processed_num rank record_batch
        remaining_indices reset set_epoch state_dict total_size
    """,
    "elastic.TorchState": """
        check_host_updates commit on_hosts_updated on_reset register_reset_callbacks reset restore save sync
    """,
    "elastic.state.StateHandler": "restore save set_value sync",
    "ProcessSet": "included rank size",
    "DistributedOptimizer": "set_backward_passes_per_step skip_synchronize synchronize zero_grad",
}

SIGNATURES = {
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "alltoall": "tensor splits name process_set",
    "broadcast_object": "obj root_rank name process_set",
    "DistributedOptimizer": """
        optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups groups
        sparse_as_dense process_set
    """,
    "Compression.fp16.decompress": "tensor ctx",
    "elastic.run_fn": "func reset",
    "elastic.ElasticSampler": "dataset shuffle seed",
    "elastic.ElasticSampler.record_batch": "batch_idx batch_size",
    "elastic.TorchState.on_hosts_updated": "self timestamp update_res",
    "elastic.state.ObjectState": "bcast_object get_rank attributes",
    "elastic.state.ModelStateHandler": "model",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
}


def found(path: str) -> object:
    value: object = hvd
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("module", PUBLIC)
def test_every_name_is_there(module: str) -> None:
    there = importlib.import_module(f"sordino.torch.{module}".rstrip("."))
    assert [name for name in PUBLIC[module].split() if not hasattr(there, name)] == []


@pytest.mark.parametrize("path", METHODS)
def test_every_method_is_there(path: str) -> None:
    assert [name for name in METHODS[path].split() if not hasattr(found(path), name)] == []


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_come_in_the_same_order(path: str) -> None:
    wanted = SIGNATURES[path].split()
    mine = [name for name in inspect.signature(found(path)).parameters if name != "self" or "self" in wanted]
    assert mine[: len(wanted)] == wanted


def test_what_is_of_horovods_core_is_refused() -> None:
    assert not hasattr(hvd.mpi_lib_v2, "horovod_torch_poll")
    with pytest.raises(NoSuchAttribute, match=r"mpi_lib_v2\.horovod_torch_poll: .* hvd\.synchronize\(\)"):
        _ = hvd.mpi_ops.mpi_lib.horovod_torch_poll
    assert hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2") is None
    with pytest.raises(ImportError, match="Sordino supports PyTorch only"):
        hvd.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")


def test_names_of_algorithms_are_literals_for_type_checkers() -> None:
    assert set(get_args(AlgorithmName)) == set(registry._SHIPPED)
    assert "def __getattr__" in inspect.getsource(hvd.DistributedOptimizer).partition("if not TYPE_CHECKING")[2]


@pytest.mark.parametrize("kind", ["warned", "converted"])
def test_torchs_sync_batch_norm_is_warned_of(kind: str) -> None:
    model = torch.nn.ModuleDict({"deep": torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.SyncBatchNorm(3))})
    if kind == "converted":
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    seen: list[str] = []

    def job() -> None:
        mine = copy.deepcopy(model)
        sgd = torch.optim.SGD(mine.parameters(), lr=0.1)
        hvd.DistributedOptimizer(sgd, mine.named_parameters())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync_batch_norm.warnings, "warn", lambda text, **_: seen.append(text))
        sim.run(2, job)
    assert any("'deep.1' is a torch.nn.SyncBatchNorm" in text for text in seen) == (kind == "warned")
