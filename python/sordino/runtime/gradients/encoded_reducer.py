"""Reducer that sends gradients encoded (`compression=Int8()`), with error feedback for the codecs that need it.

An encoded sum has two parts, which depend on each other (compressed_mean.py). So the reductions of buckets run one
after the other when backward has ended, in the order of the plan, and backward hides none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sordino.runtime.collectives.operation import Sum
from sordino.runtime.collectives.ops import allreduce_
from sordino.runtime.context import Context
from sordino.runtime.exchange.compressed_mean import CompressedMean, SetTransfers
from sordino.runtime.gradients.bucket import Bucket
from sordino.runtime.gradients.reducer import GradientReducer, versions_of
from sordino.runtime.gradients.settings import Settings
from sordino.runtime.process_set import ProcessSet


class _WhenWaited:
    """Handle of a reduction that runs when it is waited for."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.wait = run


class EncodedReducer(GradientReducer):
    """Reducer for a `Codec` in the place of a compression. Averages only. Arguments are those of `GradientReducer`."""

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        settings: Settings,
        compare: bool,
        in_step: ProcessSet | None = None,
    ) -> None:
        self._means: dict[str, CompressedMean] = {}  # by name of the bucket
        super().__init__(context, names, parameters, settings, compare, in_step)

    def renew(self) -> None:
        super().renew()
        self._means = {}

    def _make_bucket(self, name: str, members: list[int]) -> Bucket:
        bucket = super()._make_bucket(name, members)
        bucket.private = True  # encoding copies gradients anyway, so that they need no shared memory
        return bucket

    def _start(self, bucket: Bucket) -> None:
        self.announce_change(bucket)
        if self._own is not None:
            self._own.keep(bucket.members)
        bucket.handle = _WhenWaited(lambda: self._average(bucket))  # type: ignore[assignment]

    @torch.no_grad()
    def _average(self, bucket: Bucket) -> None:
        """Replace a bucket's gradients by their means over all ranks. Collective, in the order of the plan."""
        name = bucket.name + self._suffix
        sent = bucket.gather()
        if self.settings.finite is not None:
            bucket.looked = self.settings.look(bucket.members, sent)
        allreduce_(bucket.flags, op=Sum, name=f"{name}.flags", process_set=self.settings.process_set)
        values = torch.cat([gradient.reshape(-1) for gradient in sent]).to("cpu", torch.float32)
        self._mean_of(bucket, values.numel()).run(values)
        parts = values.split([gradient.numel() for gradient in sent])
        for gradient, part in zip(sent, parts):
            gradient.copy_(part.view_as(gradient))
        bucket.versions = versions_of(sent)

    def _mean_of(self, bucket: Bucket, count: int) -> CompressedMean:
        codec, process_set = self.settings.codec, self.settings.process_set
        assert codec is not None
        mean = self._means.get(bucket.name)
        if mean is None:
            transfers = SetTransfers(bucket.name, process_set)
            mean = self._means[bucket.name] = CompressedMean(count, codec, f"gradients of {bucket.name}", transfers)
        return mean


def reducer_for(
    context: Context,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    settings: Settings,
    compare: bool,
    in_step: ProcessSet | None = None,
) -> GradientReducer:
    """Return the reducer for `settings`, with a codec or without one. Arguments are those of `GradientReducer`."""
    cls = GradientReducer if settings.codec is None else EncodedReducer
    return cls(context, names, parameters, settings, compare, in_step)
