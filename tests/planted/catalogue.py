"""All errors."""

from __future__ import annotations

from planted import around, core, face, optimizers, records

ERRORS = [*core.ERRORS, *optimizers.ERRORS, *around.ERRORS, *face.ERRORS, *records.ERRORS]
