"""Reduction of buckets with a codec (`compression=Int8()`), with error feedback for the codecs that need it.

An encoded mean has two parts, the second of which depends on the first (compressed_mean.py, low_rank_mean.py). So the
reductions run when the reducer waits for them: after backward, one bucket after the other, in the order of the plan.
Backward does not hide them.

A parameter that no rank has used gets no gradient, so its mean is dropped. Its residuals are kept out of that mean:
otherwise they would be sent with it, and lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from sordino.codecs import Codec
from sordino.runtime.collectives.operation import Sum
from sordino.runtime.collectives.ops import allreduce_
from sordino.runtime.context import Context
from sordino.runtime.exchange.residuals import Encoded, Feedback, Sender
from sordino.runtime.exchange.saved_residuals import Piece
from sordino.runtime.exchange.tensor_means import TensorMean, mean_of
from sordino.runtime.exchange.transfers import SetTransfers
from sordino.runtime.gradients.bucket import Bucket
from sordino.runtime.gradients.settings import Settings
from sordino.runtime.process_set import ProcessSet


class EncodedBuckets:
    """Encoded means of the buckets of one reducer, and their residuals.

    Attributes:
        feedback: the residuals, for checkpoints.

    Args:
        context: the context of this rank.
        codec: the codec, the same on all ranks.
        settings: settings of the reduction, which is an average.
        workers: the ranks that train together, which may average in groups.
    """

    def __init__(self, context: Context, codec: Codec, settings: Settings, workers: ProcessSet) -> None:
        self._codec, self._settings = codec, settings
        ranks = settings.process_set.ranks or []
        self._place = ranks.index(context.rank) if context.rank in ranks else 0
        self._means: dict[str, TensorMean] = {}  # by name of the bucket
        sender = Sender.of(context, settings.process_set, codec, workers=len(workers.ranks or []))
        self.feedback = Feedback(sender, "gradients")

    @torch.no_grad()
    def average(self, bucket: Bucket, name: str) -> None:
        """Replace a bucket's gradients by their means over all ranks. Collective, in the order of the plan.

        Args:
            bucket: the bucket.
            name: name of this reduction.
        """
        sent = bucket.gather()
        bucket.looked = self._settings.look(bucket.members, sent)
        allreduce_(bucket.flags, op=Sum, name=f"{name}.flags", process_set=self._settings.process_set)
        mean = self._means.get(bucket.name)
        if mean is None:
            transfers = SetTransfers(bucket.name, self._settings.process_set)
            mean = self._means[bucket.name] = mean_of(self._codec, sent, f"gradients of {bucket.name}", transfers)
            self.feedback.attach(_pieces(bucket), mean)
        with self._set_apart(mean, _unused(bucket)):
            mean.run(sent)
        bucket.versions = [gradient._version for gradient in sent]

    @contextmanager
    def _set_apart(self, mean: Encoded, pieces: Sequence[Piece]) -> Iterator[None]:
        """Keep residuals of these pieces, unchanged, out of a mean that is computed within the context."""
        parts: list[torch.Tensor] = []
        for number, residual in enumerate(mean.residuals):
            first = number * self._place * len(residual)  # its first value; the second residual is that of a shard
            parts += [residual[max(one.at - first, 0) : max(one.at + one.whole - first, 0)] for one in pieces]
        kept = [part.clone() for part in parts]
        for part in parts:
            part.zero_()
        try:
            yield
        finally:
            for part, value in zip(parts, kept):
                part.copy_(value)

    def report(self) -> None:
        """Warn of gradients of this rank that were not finite, once all buckets are reduced. Not collective.

        On a GPU this waits for the encodings. If it were called after each bucket, the next bucket could not be queued
        before the transfers of that bucket are complete.
        """
        for mean in self._means.values():
            mean.report()


def _pieces(bucket: Bucket) -> list[Piece]:
    """Return the positions of the members among the values of a bucket."""
    sizes = [bucket.parameters[i].numel() for i in bucket.members]
    return [
        Piece(bucket.names[i], 0, size, end - size, size)
        for i, size, end in zip(bucket.members, sizes, accumulate(sizes))
    ]


def _unused(bucket: Bucket) -> list[Piece]:
    """Return the positions of the members that no rank has used, once the flags are summed."""
    if not bucket.missing:  # this rank has used all of them
        return []
    return [piece for piece, flag in zip(_pieces(bucket), bucket.flags.tolist()) if flag == 0]
