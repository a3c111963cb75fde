"""All errors."""

from __future__ import annotations

from planted import around, core, deadlines, edges, face, gradients, optimizers, records, users

MODULES = (core, deadlines, edges, gradients, optimizers, around, face, records, users)
ERRORS = [error for module in MODULES for error in module.ERRORS]
