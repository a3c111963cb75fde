"""Reports of the benchmarks of `sordino bench`."""

from __future__ import annotations

from sordino.bench import pictures, tables
from sordino.report.records import Report

REPORTS = {
    "collectives": Report(tables.collectives, pictures.collectives),
    "fusion": Report(tables.fusion, pictures.fusion),
    "kernels": Report(tables.kernels, pictures.kernels),
}
