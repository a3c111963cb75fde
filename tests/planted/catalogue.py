"""All errors."""

from __future__ import annotations

from planted import around, core, deadlines, edges, face, optimizers, records, users

MODULES = (core, deadlines, edges, optimizers, around, face, records, users)
ERRORS = [error for module in MODULES for error in module.ERRORS]
