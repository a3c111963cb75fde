"""Errors of the library. Every failure that a user can meet has one of these types; the C++ core raises the same ones.

All are subclasses of `SordinoError`. `sordino.torch` also offers that class under Horovod's name
`HorovodInternalError`, so `except HorovodInternalError` in an existing script keeps working.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class SordinoError(RuntimeError):
    """Base class of all errors of the library."""


class UsageError(SordinoError, ValueError):
    """The caller asked for something impossible. Nothing was sent, and the world stays usable."""


class OperationMismatch(UsageError):
    """Ranks disagree about one operation (shape, dtype, op, root). Raised on all of them; the world stays usable."""


class LayoutMismatch(UsageError):
    """Ranks wrapped different models. The message shows the first tensor that differs."""


class ConfigurationMismatch(UsageError):
    """Ranks have different versions of Sordino or different settings. Raised on all of them.

    Attributes:
        settings: for each setting that differs, the ranks that have each value.
    """

    def __init__(self, message: str, settings: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None) -> None:
        super().__init__(message)
        self.settings = dict(settings or {})


class NoSuchAttribute(UsageError, AttributeError):
    """The optimizer's algorithm, or Horovod's compiled module, lacks this attribute. `hasattr()` returns False."""


class StepOrderError(UsageError, AssertionError):
    """backward, step, synchronize and zero_grad were called in an order that would lose gradients."""


class Unreadable(UsageError):
    """A checkpoint cannot be read, but may be intact. So no earlier one is loaded in its place."""


class Unwritable(SordinoError):
    """A checkpoint cannot be written, such as to a full disk. Earlier ones are unchanged."""


class NonFinite(SordinoError, ArithmeticError):
    """Gradients or parameters have NaN or Inf (`check_finite=True`).

    Raised on all ranks that would have used them; the world stays usable.

    Attributes:
        tensors: for each rank that has such values, the names of its first few such tensors, each with "NaN" or "Inf".
            Empty if all ranks had finite gradients and their reduction overflowed.
        ranks: the keys of `tensors`.
    """

    def __init__(self, message: str, tensors: Mapping[int, Mapping[str, str]] | None = None) -> None:
        super().__init__(message)
        self.tensors = {rank: dict(found) for rank, found in (tensors or {}).items()}
        self.ranks: tuple[int, ...] = tuple(self.tensors)


class PeerLost(SordinoError):
    """Ranks have died, left or raised. Permanent: every later operation of this world raises it too.

    Attributes:
        ranks: the lost world ranks. If a rank left because it had lost others, these are named in its place.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)


class Timeout(SordinoError, TimeoutError):
    """An operation passed its deadline (`SORDINO_TIMEOUT_S`). Permanent, like `PeerLost`.

    Attributes:
        operation: the name of the operation.
        missing: the world ranks that did not take part in time.
    """

    def __init__(self, message: str, operation: str = "", missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.operation = operation
        self.missing: tuple[int, ...] = tuple(missing)


class NoQuorum(SordinoError):
    """With `on_peer_lost="continue"`: this rank reaches at most half of the ranks that may be alive.

    The other ranks may continue, so this rank must stop. Its data are intact.
    """


class Evicted(SordinoError):
    """With `on_peer_lost="continue"`: this rank was silent for too long, and the other ranks continue without it."""


class TransportError(SordinoError):
    """The transport failed (an MPI error, shared memory exhausted)."""


class DeviceError(SordinoError):
    """A GPU or its software (CUDA, NCCL) failed. The results of its pending work are lost."""


class NotBuilt(SordinoError):
    """This build or this machine lacks a feature; the message says how to get it."""
