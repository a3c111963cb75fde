"""Sordino: data-parallel training for PyTorch that talks less.

`import sordino.torch as hvd` gives Horovod's names; `sordino.algorithms` has the algorithms.
"""

from sordino.errors import (
    ConfigurationMismatch,
    DeviceError,
    Evicted,
    LayoutMismatch,
    NonFinite,
    NoQuorum,
    NoSuchAttribute,
    NotBuilt,
    OperationMismatch,
    PeerLost,
    SordinoError,
    StepOrderError,
    Timeout,
    TransportError,
    Unreadable,
    Unwritable,
    UsageError,
)

__all__ = [
    "ConfigurationMismatch",
    "DeviceError",
    "Evicted",
    "LayoutMismatch",
    "NoQuorum",
    "NoSuchAttribute",
    "NonFinite",
    "NotBuilt",
    "OperationMismatch",
    "PeerLost",
    "SordinoError",
    "StepOrderError",
    "Timeout",
    "TransportError",
    "Unreadable",
    "Unwritable",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> str:
    # Read on demand, so that `sordino doctor` can still report a core that does not import.
    if name == "__version__":
        from sordino._core import __version__

        return __version__
    raise AttributeError(f"module 'sordino' has no attribute {name!r}")
