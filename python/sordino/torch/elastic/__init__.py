"""Training that survives the loss of ranks, with the names of `horovod.torch.elastic`: `@hvd.elastic.run`."""

from sordino.torch.elastic.run import run, run_fn
from sordino.torch.elastic.sampler import ElasticSampler
from sordino.torch.elastic.state import HostsUpdatedInterrupt, ObjectState, State, TorchState
from sordino.torch.lifecycle import init, shutdown

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "init",
    "run",
    "run_fn",
    "shutdown",
]
