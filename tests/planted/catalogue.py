"""All errors."""

from __future__ import annotations

from planted import around, core, face, optimizers

ERRORS = [*core.ERRORS, *optimizers.ERRORS, *around.ERRORS, *face.ERRORS]
