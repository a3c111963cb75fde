"""Reports of the benchmarks of `sordino bench`."""

from __future__ import annotations

from sordino.bench import pictures, tables
from sordino.bench.contestants import pictures as collective_pictures
from sordino.bench.contestants import tables as collective_tables
from sordino.report.records import Report

REPORTS = {
    "collectives": Report(collective_tables.markdown, collective_pictures.draw),
    "fusion": Report(tables.fusion, pictures.fusion),
    "kernels": Report(tables.kernels, pictures.kernels),
}
