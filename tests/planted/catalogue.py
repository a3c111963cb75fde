"""All errors."""

from __future__ import annotations

from planted import around, core, cuda, deadlines, edges, face, gradients, logs, optimizers, records, users

MODULES = (core, cuda, deadlines, edges, gradients, optimizers, around, face, logs, records, users)
ERRORS = [error for module in MODULES for error in module.ERRORS]
