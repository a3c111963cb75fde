"""All errors."""

from __future__ import annotations

from planted import around, core, deadlines, edges, face, gradients, logs, optimizers, records, users

MODULES = (core, deadlines, edges, gradients, optimizers, around, face, logs, records, users)
ERRORS = [error for module in MODULES for error in module.ERRORS]
