"""Mean over all ranks of a fragment's values, computed while the workers train on.

The values are copied to memory that no parameter uses, and the core's thread averages them there. This is the only
communication of an outer step.

| state | begin() | arrived() | finish() |
|---|---|---|---|
| idle | copies the values and starts the all-reduce: in flight | not allowed | not allowed |
| in flight | not allowed | waits: arrived | waits, and returns the means: idle |
| arrived | not allowed | returns the means | returns the means: idle |

A failed all-reduce stays in flight, so each attempt to use its result raises the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch

from sordino._core import Handle, Layout
from sordino.algorithms.diloco import DiLoCo
from sordino.codecs import FlatCodec
from sordino.runtime.collectives.operation import Average
from sordino.runtime.context import Context
from sordino.runtime.exchange.channel import PreparedReduction
from sordino.runtime.exchange.compressed_mean import CompressedMean
from sordino.runtime.exchange.flat_buffer import FlatBuffer
from sordino.runtime.exchange.transfers import SetTransfers
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.recovery.losses import LOSSES
from sordino.runtime.tensors import dtype_code


class Mean(Protocol):
    """Mean over all ranks of the values of a fragment: `BackgroundMean`, or `EncodedMean` with a codec."""

    @property
    def encoded(self) -> Sequence[CompressedMean]:
        """The means with a codec, one for each tensor of values; empty without a codec."""
        ...

    @property
    def pending(self) -> bool:
        """Whether a mean has begun and is not finished."""
        ...

    def begin(self, values: Sequence[torch.Tensor]) -> None:
        """Start to average copies of these values. Collective."""

    def finish(self) -> list[torch.Tensor]:
        """Wait for the means, return them, and become idle. Collective."""
        ...

    @property
    def averaged(self) -> bool:
        """Whether `state()` contains the means, instead of the values of this rank."""
        ...

    def state(self) -> list[torch.Tensor]:
        """Return the state of a pending mean, for `continue_from`. Not collective."""
        ...

    def continue_from(self, state: Sequence[torch.Tensor], averaged: bool = True) -> None:
        """Replace the state. Nothing is pending if `state` is empty. Not collective.

        Args:
            state: a state of this class or of the other one.
            averaged: `averaged` of the object whose state it is, the same on all ranks.
        """


def mean_of(
    context: Context, process_set: ProcessSet, like: Sequence[torch.Tensor], name: str, algorithm: DiLoCo
) -> Mean:
    """Return the object that averages tensors like these over the ranks, with the algorithm's compression."""
    if algorithm.codec is None:
        return BackgroundMean(context, process_set, like, name)
    return EncodedMean(process_set, like, name, algorithm.codec, algorithm.kept)


class BackgroundMean:
    """Mean over all ranks of flat tensors. Each object has at most one mean in flight.

    Args:
        context: the context of this rank.
        process_set: the ranks.
        like: 1-d tensors, float32 or float64, with the sizes and dtypes of the values, all on one device. If one is
            empty, all must be.
        name: name of the all-reduce, the same on all ranks.
    """

    encoded: Sequence[CompressedMean] = ()

    def __init__(self, context: Context, process_set: ProcessSet, like: Sequence[torch.Tensor], name: str) -> None:
        specs = [(f"{name}.{number}", dtype_code(one), tuple(one.shape)) for number, one in enumerate(like)]
        self._values: list[torch.Tensor] = []
        self._reduction: PreparedReduction | None = None  # None: there are no values
        if specs:
            buffer = FlatBuffer(context, Layout(specs, groups=[0] * len(specs)), like[0].device)
            self._values = [buffer.like(one, offset) for one, offset in zip(like, buffer.layout.offsets)]
            self._reduction = PreparedReduction(context, self._values, Average, name, process_set)
        self._handle: Handle | None = None  # None: the means have arrived
        self._unsent: list[torch.Tensor] | None = None  # loaded values of this rank, which `finish` averages
        self.pending = False
        """Whether a mean has begun and is not finished."""

    @torch.no_grad()
    def begin(self, values: Sequence[torch.Tensor]) -> None:
        """Start to average copies of these values, and return at once. Collective.

        Args:
            values: tensors with the shapes and dtypes of `like`. The caller may change them afterwards.

        Raises:
            PeerLost, Timeout, TransportError: a rank is lost.
        """
        for mine, value in zip(self._values, values):
            mine.copy_(value)
        if self._reduction is not None:
            self._handle = self._reduction.start()
        self.pending = True

    def arrived(self) -> list[torch.Tensor]:
        """Wait for the means, and return them. They stay pending. The tensors are valid until the next `begin`.

        Raises:
            PeerLost, Timeout, TransportError: the all-reduce has failed, and there are no means.
        """
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        return self._values

    def finish(self) -> list[torch.Tensor]:
        """Wait for the means and return them; tensors and errors as in `arrived`. Then nothing is pending."""
        if self._unsent is not None:
            self.begin(self._unsent)
            self._unsent = None
        means = self.arrived()
        self.pending = False
        return means

    @property
    def averaged(self) -> bool:
        return self._unsent is None

    def state(self) -> list[torch.Tensor]:
        """Wait for the means, and return copies of them; if loaded values are not averaged yet, copies of these."""
        return [one.clone() for one in (self.arrived() if self._unsent is None else self._unsent)]

    @torch.no_grad()
    def continue_from(self, means: Sequence[torch.Tensor], averaged: bool = True) -> None:
        """Replace the state. Nothing is pending if `means` is empty; otherwise the means have arrived.

        Unless `averaged`, the `means` are values of this rank (a state of `EncodedMean`), which `finish` averages.

        Waits for a mean in flight, because its memory is reused, and drops its result or error.
        """
        if self._handle is not None:
            with suppress(*LOSSES):
                self._handle.wait()
            self._handle = None
        own = [value.to(mine, copy=True) for mine, value in zip(self._values, means)]
        self._unsent = None if averaged or not own else own
        for mine, value in zip(self._values, own):
            mine.copy_(value)
        self.pending = len(means) > 0


class EncodedMean:
    """Mean over all ranks, with a codec. `begin` starts the first half of the communication, `finish` does the second.

    So `state()` contains this rank's own values, which are sent again after loading. Means in a state of
    `BackgroundMean` are used as they are.

    Args:
        process_set: the ranks.
        like: 1-d tensors with the sizes, dtypes and device of the values. They are sent as float32.
        name: name of the operations, the same on all ranks.
        codec: the codec.
        kept: factor by which residuals decay (`CompressedMean`).
    """

    def __init__(
        self, process_set: ProcessSet, like: Sequence[torch.Tensor], name: str, codec: FlatCodec, kept: float
    ) -> None:
        names = [f"{name}.{number}" for number in range(len(like))]
        self._like = list(like)
        self.encoded = [
            CompressedMean(one.numel(), codec, name, SetTransfers(name, process_set), kept, one.device)
            for name, one in zip(names, like)
        ]
        self._values: list[torch.Tensor] = []  # values of this rank
        self._means: list[torch.Tensor] | None = None  # loaded means; None: the means have to be computed
        self._in_flight = False
        self._failure: Exception | None = None
        self.pending = False

    @torch.no_grad()
    def begin(self, values: Sequence[torch.Tensor]) -> None:
        self._values = [value.to(torch.float32, copy=True) for value in values]
        self.pending = True
        self._send()

    def _send(self) -> None:
        self._failure, self._in_flight = None, True
        try:
            for mean, value in zip(self.encoded, self._values):
                mean.begin(value)
        except Exception as error:
            self._failure = error
            raise

    @torch.no_grad()
    def finish(self) -> list[torch.Tensor]:
        if self._means is not None:
            means, self._means, self.pending = self._means, None, False
            return means
        if self._failure is not None:
            raise self._failure
        try:
            if not self._in_flight:
                self._send()
            means = [mean.finish().to(one) for mean, one in zip(self.encoded, self._like)]
            for mean in self.encoded:
                mean.report()
        except Exception as error:
            self._failure = error  # a second attempt must not wait for operations that have ended
            raise
        self._values, self._in_flight, self.pending = [], False, False
        return means

    @property
    def averaged(self) -> bool:
        return self._means is not None

    def state(self) -> list[torch.Tensor]:
        return [value.clone() for value in (self._values if self._means is None else self._means)]

    @torch.no_grad()
    def continue_from(self, values: Sequence[torch.Tensor], averaged: bool = True) -> None:
        for mean in self.encoded:
            mean.give_up()
        self._values, self._means, self._in_flight, self._failure = [], None, False, None
        if averaged and len(values) > 0:
            self._means = [value.to(one, copy=True) for value, one in zip(values, self._like)]
        else:
            self._values = [value.to(one.device, torch.float32, copy=True) for value, one in zip(values, self._like)]
        self.pending = len(values) > 0
