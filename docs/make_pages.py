"""Writes the parts of pages that are made from the code: python docs/make_pages.py

Such a part is between `<!-- made: options crossover -->` and `<!-- end -->`; the function of that name makes it. It is
written into the page, so that the page can be read anywhere. tests/python/project/test_pages.py compares page and code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from _ext import choosing, tables
from sordino._core import variables
from sordino.report.tables import table

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"(<!-- made: (\S+)(?: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def targets() -> str:
    """Return a table of the results with limits: a link to the result, number of limits, and number that it meets."""
    rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        limits = json.loads(path.read_text()).get("targets", [])
        if limits:
            met = sum(one["met"] is True for one in limits)
            rows.append([f"[{path.stem}](../benchmarks/results/{path.stem}.md)", str(len(limits)), str(met)])
    return table(["result", "limits", "met"], rows)


def configuration() -> str:
    """Return the variables that the core reads, from csrc/base/config.cc."""
    rows = [
        f"| `{name}` | {f'`{alias}`' if alias else ''} | {default or '(unset)'} | {meaning} |"
        for name, alias, default, meaning in variables()
    ]
    return "\n".join(["| variable | also read as | default | meaning |", "|---|---|---|---|", *rows])


def wheels() -> str:
    """Return a table of the sizes of wheels in MB, from the file that `make wheel` writes."""
    found = json.loads((ROOT / "tools" / "wheels" / "sizes.json").read_text())
    names = dict.fromkeys(name for sizes in found.values() for name in sizes)
    labels = {"wheel": "the wheel", "installed": "installed"}
    rows = [
        [labels.get(name, f"of it `{name}`"), *(f"{sizes.get(name, 0):.1f}" for sizes in found.values())]
        for name in names
    ]
    return table(["MB", *found], rows)


MAKERS: dict[str, Callable[..., str]] = {
    "algorithms": tables.overview,
    "choosing": choosing.markdown,
    "configuration": configuration,
    "costs": tables.costs,
    "idea": tables.idea,
    "options": tables.options,
    "targets": targets,
    "wheels": wheels,
}


def made(text: str) -> str:
    """Return a page with newly made blocks."""

    def block(found: re.Match[str]) -> str:
        begin, maker, argument, end = found.groups()
        return f"{begin}{MAKERS[maker](*filter(None, [argument]))}\n{end}"

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    for page in sorted((ROOT / "docs").rglob("*.md")):
        before = page.read_text()
        after = made(before)
        if after != before:
            page.write_text(after)
            print(page.relative_to(ROOT))
