"""All errors."""

from __future__ import annotations

from planted import around, core, edges, face, optimizers, records

ERRORS = [*core.ERRORS, *edges.ERRORS, *optimizers.ERRORS, *around.ERRORS, *face.ERRORS, *records.ERRORS]
