"""All errors."""

from __future__ import annotations

from planted import (
    around,
    codecs,
    commands,
    core,
    cuda,
    deadlines,
    edges,
    examples,
    face,
    gradients,
    growth,
    logs,
    optimizers,
    records,
    users,
)

MODULES = (
    codecs,
    commands,
    core,
    cuda,
    deadlines,
    edges,
    gradients,
    optimizers,
    around,
    examples,
    face,
    growth,
    logs,
    records,
    users,
)
ERRORS = [error for module in MODULES for error in module.ERRORS]
