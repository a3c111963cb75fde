"""Training that outlives ranks, with the names of `horovod.torch.elastic`: `@hvd.elastic.run`."""

from sordino.torch.elastic.run import run
from sordino.torch.elastic.sampler import ElasticSampler
from sordino.torch.elastic.state import HostsUpdatedInterrupt, ObjectState, State, TorchState

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]
