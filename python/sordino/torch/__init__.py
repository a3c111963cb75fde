"""A drop-in for `horovod.torch` 0.28: `import sordino.torch as hvd`.

Horovod's names with Horovod's meaning, plus `DistributedOptimizer(algorithm=...)`, shared memory (`shared_empty`,
`share`) and `stats()`.
"""

from sordino.errors import SordinoError
from sordino.torch.autograd import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from sordino.torch.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stats,
    stop_timeline,
)
from sordino.torch.compression import Compression
from sordino.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from sordino.torch.memory import is_shared, share, shared_empty
from sordino.torch.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    barrier,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter_async,
    synchronize,
)
from sordino.torch.optimizer import DistributedOptimizer
from sordino.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from sordino.torch.sparse import sparse_allreduce_async
from sordino.torch.sync_batch_norm import SyncBatchNorm

HorovodInternalError = SordinoError

__all__ = [name for name in dir() if not name.startswith("_")]
