"""Markdown tables, and sizes and times in readable units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def format_bytes(count: int) -> str:
    """Return the size in the largest unit that keeps it whole."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """Return a time with three digits in a suitable unit. Times from 1000 s on are in whole seconds."""
    if abs(seconds) >= 999.5:
        return f"{seconds:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def format_quartiles(times: Mapping[str, float]) -> str:
    """Return the median of times in seconds, and the quartiles in brackets."""
    return f"{format_seconds(times['median'])} ({format_seconds(times['q1'])} to {format_seconds(times['q3'])})"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Return a Markdown table that is readable in a terminal, too. Columns after the first `texts` are numbers."""
    lines = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]

    def padded(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    rule = ["-" * width if column < texts else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join([padded(lines[0]), padded(rule), *map(padded, lines[1:])])
