"""`DistributedOptimizer(..., mesh=...)` with FSDP2, in jobs of processes (mesh_worker.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed_jobs import WORKER, assert_well, run
from mp.mesh_models import Net
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from sordino.algorithms import AllReduce, Crossover


@pytest.mark.drill("training along a dimension of a device mesh")
@pytest.mark.parametrize("size", [2, 4])
def test_replicas_of_shards(size: int, tmp_path: Path) -> None:
    """Sharded replicas train as whole models do; plain torch loads their checkpoints without a process group."""
    # The job of two ranks also has the hooks of DDP, as the start of a job takes most of its time.
    others = "hooks" if size == 2 else "final_gradients,unused_parameters,tensor_parallel,checkpoints"
    job = tmp_path / "job"
    worker = WORKER.with_name("mesh_worker.py")
    assert_well(run(f"replicas,errors,{others}", size, job, str(tmp_path), worker=worker))
    for algorithm in (AllReduce(), Crossover()) if size > 2 else ():
        model = Net().double()
        adam = torch.optim.Adam(model.parameters(), lr=0.02)
        into = dict(zip(("model", "optimizer"), get_state_dict(model, adam)))
        dcp.load(into, checkpoint_id=tmp_path / algorithm.label, no_dist=True)
        set_state_dict(model, adam, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
        assert all(float(state["step"]) == 3 for state in adam.state.values())
        if isinstance(algorithm, AllReduce):  # with Crossover, replicas differ
            full = torch.load(tmp_path / "full.pt")
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, full[name])
