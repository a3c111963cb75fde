"""Communication hooks of DistributedDataParallel, for any backend of torch.distributed.

DDP calls a hook for each bucket of gradients, as soon as backward has produced them. The hook is always the function
`average`. Its state decides how gradients are averaged::

    ddp_model.register_comm_hook(hooks.Compressed(Compression.bf16), hooks.average)

- `Compressed`: by an all-reduce of compressed gradients.
- `Encoded`: with a codec: in a few bits per value, or as low-rank factors (PowerSGD); with error feedback, and sums in
  float32.
- `SharedBuckets`: in memory that the ranks of a node share. The backend must be "sordino".
- `PostLocalSGD`: over all ranks in the first steps, later over some or none; then parameters are averaged, too.

To add a state, derive from `BucketAverage`. A compression whose tensors all-reduce can add up needs only a
`Compressor`.
"""

# Without `from __future__ import annotations`, because DDP compares the annotations of a hook with classes.

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from sordino.codecs import Codec, codec_of
from sordino.distributed.operations import Operations
from sordino.errors import UsageError
from sordino.runtime.collectives.compression import Compression, Compressor
from sordino.runtime.exchange.tensor_means import TensorMean, mean_of
from sordino.runtime.exchange.transfers import Received

__all__ = [
    "BucketAverage",
    "Compressed",
    "Compression",
    "Compressor",
    "Encoded",
    "PostLocalSGD",
    "SharedBuckets",
    "average",
]

dist: Any = torch.distributed  # its annotations lack much of what a hook uses
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 has renamed it


class BucketAverage(ABC):
    """Base class of states for the hook `average`."""

    @abstractmethod
    def start(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Start to average the gradients of a bucket. Collective, in the same order on all ranks.

        Args:
            bucket: bucket of DDP. `bucket.buffer()` is a 1-d tensor with this rank's gradients, and may be overwritten.
                `bucket.index()` identifies it from the second step on: DDP makes new buckets after the first step.

        Returns:
            A future of the averages, with the shape and dtype of the buffer. It may be the buffer.
        """


def average(state: BucketAverage, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the gradients of a bucket in the way of `state`: the hook for `register_comm_hook(state, average)`.

    Raises:
        UsageError: `state` is not a `BucketAverage`.
    """
    if not isinstance(state, BucketAverage):
        raise UsageError(
            f"hooks.average: the state is a {type(state).__name__}, and must be one of sordino.distributed.hooks: "
            "register_comm_hook(hooks.Compressed(Compression.bf16), hooks.average)"
        )
    return state.start(bucket)


class Compressed(BucketAverage):
    """Averages gradients by an all-reduce of compressed gradients.

    Every rank divides its gradients by the number of ranks in their own precision, and compresses the quotients. Their
    sum, in the precision of the compression, is the average. An average beyond the range of float16 becomes infinite on
    all ranks, as with torch's `fp16_compress_hook`. GradScaler skips such a step. Sparse gradients are not compressed.

    Args:
        compression: `Compression.fp16`, `.bf16` or `.none`, or a `Compressor` whose tensors all-reduce can add up.
        group: process group of the ranks; None: all ranks.

    Raises:
        UsageError: `compression` is not a `Compressor`.
    """

    def __init__(self, compression: type[Compressor] = Compression.none, group: Any = None) -> None:
        if not (isinstance(compression, type) and issubclass(compression, Compressor)):
            raise UsageError(f"Compressed({compression!r}): must be a Compressor, such as Compression.bf16")
        self.compression, self.group = compression, group

    def start(self, bucket: GradBucket) -> Future[torch.Tensor]:
        gradients: torch.Tensor = bucket.buffer()
        gradients.div_(_size_of(self.group))
        packed, state = (gradients, None) if gradients.is_sparse else self.compression.compress(gradients)
        work = dist.all_reduce(packed, group=self.group, async_op=True)

        def finish(future: Any) -> torch.Tensor:
            total: torch.Tensor = future.value()[0]  # raises the error of the operation
            if gradients.is_sparse:
                return total
            if total.data_ptr() != gradients.data_ptr():
                gradients.copy_(self.compression.decompress(total, state))
            return gradients

        done: Future[torch.Tensor] = work.get_future().then(finish)
        return done


class Encoded(BucketAverage):
    """Averages gradients with a codec: `PowerSGD` by two all-reduces, others by an all-to-all and an all-gather.

    Gradients are encoded in float32, whatever their dtype. What an encoding loses is added to the gradients of the next
    step (`sordino.codecs`). These residuals belong to a bucket, and start from 0 when DDP makes new buckets, after the
    first step. When the hook returns, the collectives of the bucket have ended or, on a GPU, are on the current stream.
    Sparse gradients are averaged as they are, without the codec.

    With find_unused_parameters=True DDP drops the mean of a parameter that no rank has used in a step, and with it the
    parameter's residuals. Use a codec without error feedback there, or `DistributedOptimizer`, which keeps them.

    Args:
        codec: the codec, such as `Int8()` or `PowerSGD(rank=2)`, or its name, such as "int8".
        group: process group of the ranks; None: all ranks.

    Raises:
        UsageError: there is no such codec.
    """

    def __init__(self, codec: Codec | str, group: Any = None) -> None:
        found = codec_of(codec, "Encoded(codec")
        if found is None:
            raise UsageError("Encoded(codec=None): without a codec, use Compressed()")
        self.codec, self.group = found, group
        # The parameters of each bucket and their mean, by the parameters' ids: several models may use this object.
        self._means: dict[tuple[int, ...], tuple[list[weakref.ref[torch.Tensor]], TensorMean]] = {}

    def start(self, bucket: GradBucket) -> Future[torch.Tensor]:
        gradients: torch.Tensor = bucket.buffer()
        done: Future[torch.Tensor]
        if gradients.is_sparse:  # DDP gives each sparse gradient a bucket of its own
            done = Compressed(group=self.group).start(bucket)
        else:
            self._mean_of(bucket).run(bucket.gradients())
            done = Future()
            done.set_result(gradients)
        if bucket.is_last():
            for _, each in self._means.values():
                each.report()
        return done

    def _mean_of(self, bucket: GradBucket) -> TensorMean:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        former, mean = self._means.get(key, ((), None))
        if mean is None or any(one() is None for one in former):
            # DDP makes new buckets after the first step of a model. Forget the former buckets with these parameters,
            # and the buckets of models that no longer exist.
            self._means = {
                ids: (refs, found)
                for ids, (refs, found) in self._means.items()
                if not set(ids) & set(key) and all(one() is not None for one in refs)
            }
            name = f"bucket {bucket.index()} of DistributedDataParallel"
            mean = mean_of(self.codec, bucket.gradients(), name, _GroupTransfers(self.group))
            self._means[key] = [weakref.ref(one) for one in parameters], mean
        return mean


class _GroupTransfers:
    """The collectives of a process group."""

    def __init__(self, group: Any) -> None:
        self._group, self.size, self.place = group, _size_of(group), dist.get_rank(group)

    def all_to_all(self, sent: torch.Tensor) -> Received:
        return self._start(dist.all_to_all_single, sent, 1)

    def all_gather(self, sent: torch.Tensor) -> Received:
        return self._start(_all_gather, sent, self.size)

    def all_reduce(self, sent: torch.Tensor, part: str) -> Received:
        total = sent.clone()
        work = dist.all_reduce(total, group=self._group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return total.div_(self.size)

        return wait

    def _start(self, operation: Any, sent: torch.Tensor, times: int) -> Received:
        received = torch.empty(times * sent.numel(), dtype=sent.dtype, device=sent.device)
        work = operation(received, sent, group=self._group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return received

        return wait


class SharedBuckets(BucketAverage):
    """Averages gradients in memory that the ranks of a node share, by an all-reduce without copies.

    The memory of each bucket moves to /dev/shm before its first all-reduce, with the gradients that are views of it
    (`gradient_as_bucket_view=True`). DDP uses it until it makes new buckets, after the first step.

    Args:
        group: process group of the backend "sordino"; None: all ranks.

    Raises:
        UsageError: the group has another backend for CPU tensors.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        _size_of(group)
        self._storages = _operations_of(group).shared_storages()

    def start(self, bucket: GradBucket) -> Future[torch.Tensor]:
        gradients: torch.Tensor = bucket.buffer()
        if gradients.device.type != "cpu":
            raise UsageError(f"SharedBuckets: gradients are on {gradients.device}, and must be on the CPU")
        if self._storages is not None and not gradients.is_sparse:
            self._storages.move(gradients)
            if bucket.is_last():
                self._storages.release_unused()
        work = dist.all_reduce(gradients, dist.ReduceOp.AVG, group=self.group, async_op=True)
        done: Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
        return done


class PostLocalSGD(BucketAverage):
    """Post-local SGD: averages gradients in the first steps, and parameters every `interval` steps after that.

    Like torch's `post_localSGD_hook` together with its `PeriodicModelAverager`. Steps are optimizer steps. All ranks
    must take the same steps, so GradScaler cannot be used. Momenta are not averaged. Source: Lin et al. 2018.

    Args:
        optimizer: optimizer of the model's parameters, which are averaged after its steps.
        start: number of steps with gradients averaged as `before` says.
        interval: steps from one averaging of parameters to the next, from step `start` on.
        before: state that averages gradients in the first steps; None: `Compressed()`.
        within: state that averages gradients in later steps, such as `Compressed(group=...)` with the ranks of a node;
            None: each rank uses its own gradients.
        group: process group of the ranks whose parameters are averaged; None: all ranks.

    Attributes:
        steps: number of steps that the optimizer has taken.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start: int,
        interval: int,
        before: BucketAverage | None = None,
        within: BucketAverage | None = None,
        group: Any = None,
    ) -> None:
        if start < 0 or interval < 1:
            raise UsageError(f"PostLocalSGD(start={start}, interval={interval}): start must be >= 0, and interval >= 1")
        self.first_local, self.interval, self.group = start, interval, group
        self.before, self.within = before or Compressed(), within
        self.steps = 0
        optimizer.register_step_post_hook(self._after_step)

    def start(self, bucket: GradBucket) -> Future[torch.Tensor]:
        how = self.before if self.steps < self.first_local else self.within
        if how is not None:
            return how.start(bucket)
        own: Future[torch.Tensor] = Future()
        own.set_result(bucket.buffer())
        return own

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps += 1
        local = self.steps - self.first_local
        if local > 0 and local % self.interval == 0:
            average_tensors((p for group in optimizer.param_groups for p in group["params"]), self.group)


@torch.no_grad()
def average_tensors(tensors: Iterable[torch.Tensor], group: Any = None) -> None:
    """Replace tensors by their averages over a process group (None: all ranks). Collective.

    Args:
        tensors: floating-point tensors of any shape, the same on all ranks. One all-reduce for each dtype and device.
        group: the process group.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.dtype, tensor.device].append(tensor)
    for same in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same]).div_(_size_of(group))
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in same])
        torch._foreach_copy_(same, [part.view_as(tensor) for part, tensor in zip(parts, same)])


def _operations_of(group: Any) -> Any:
    """Return the operations of a process group on CPU tensors. Raises UsageError for another backend than "sordino"."""
    whole = dist.group.WORLD if group is None else group
    found = whole if isinstance(whole, Operations) else whole._get_backend(torch.device("cpu"))
    if not isinstance(found, Operations):
        raise UsageError(
            f'SharedBuckets: the process group has the backend {found.name()}. Use init_process_group("sordino")'
        )
    return found


def _size_of(group: Any) -> int:
    """Return the number of ranks in a process group. Raises UsageError if this rank is not one of them."""
    size: int = dist.get_world_size(group)
    if size < 1:
        raise UsageError("a communication hook was given a process group that this rank is not in")
    return size
