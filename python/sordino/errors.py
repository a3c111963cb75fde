"""Every failure a user can meet is one of these types; the C++ core raises the same ones.

All of them are `SordinoError`, which `sordino.torch` also offers under Horovod's name
`HorovodInternalError`, so `except HorovodInternalError` in an existing script keeps working.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class SordinoError(RuntimeError):
    """Base class of all errors of the library."""


class UsageError(SordinoError, ValueError):
    """The caller asked for something impossible. Nothing was sent; the world lives on."""


class OperationMismatch(UsageError):
    """Ranks disagree about one operation (shape, dtype, op, root). Raised on all of them; the world lives on."""


class LayoutMismatch(UsageError):
    """Ranks wrapped different models: names the first tensor that differs, and which ranks have what in its place."""


class ConfigurationMismatch(UsageError):
    """Ranks are set up differently: another version of Sordino, another setting. Raised on all of them.

    Attributes:
        settings: of each setting that differs, which ranks have which value.
    """

    def __init__(self, message: str, settings: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None) -> None:
        super().__init__(message)
        self.settings = dict(settings or {})


class NoSuchAttribute(UsageError, AttributeError):
    """What an optimizer's algorithm, or Horovod's compiled module, does not have: to `hasattr()` it is not there."""


class StepOrderError(UsageError, AssertionError):
    """backward, step, synchronize and zero_grad were called in an order that would lose gradients."""


class Unreadable(UsageError):
    """A checkpoint may be there, whole, and cannot be read: no reason to take an earlier one in its place."""


class NonFinite(SordinoError, ArithmeticError):
    """Gradients or parameters have NaN or Inf (`check_finite=True`).

    Raised on all ranks that would have used them; the world lives on.

    Attributes:
        tensors: of each rank that has such values, the names of its tensors and "NaN" or "Inf", the first few. Empty if
            all ranks had finite gradients and their reduction overflowed.
        ranks: those ranks.
    """

    def __init__(self, message: str, tensors: Mapping[int, Mapping[str, str]] | None = None) -> None:
        super().__init__(message)
        self.tensors = {rank: dict(found) for rank, found in (tensors or {}).items()}
        self.ranks: tuple[int, ...] = tuple(self.tensors)


class PeerLost(SordinoError):
    """Ranks have died, left or raised. Latched: every later operation of this world raises it too.

    Attributes:
        ranks: the world ranks that are gone.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)


class Timeout(SordinoError, TimeoutError):
    """An operation passed its deadline (`SORDINO_TIMEOUT_S`). Latched like `PeerLost`.

    Attributes:
        operation: the name of the operation.
        missing: the world ranks that did not take part in time.
    """

    def __init__(self, message: str, operation: str = "", missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.operation = operation
        self.missing: tuple[int, ...] = tuple(missing)


class NoQuorum(SordinoError):
    """With `on_peer_lost="continue"`: this rank reaches no more than half of those that may be alive.

    The others may go on, so it must not; what it has is intact.
    """


class Evicted(SordinoError):
    """With `on_peer_lost="continue"`: this rank was silent for too long, and the others have gone on without it."""


class TransportError(SordinoError):
    """The library that moves the bytes failed (an MPI error, shared memory exhausted)."""


class DeviceError(SordinoError):
    """A GPU, or what drives it (CUDA, NCCL), failed; what it was to compute is lost."""


class NotBuilt(SordinoError):
    """This build or this machine lacks a feature; the message says how to get it."""
