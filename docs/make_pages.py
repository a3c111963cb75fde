"""Writes the parts of pages that are made from the code: python docs/make_pages.py

Such a part is between `<!-- made: options crossover -->` and `<!-- end -->`; the function of that name makes it. It is
written into the page, so that the page can be read anywhere. tests/python/project/test_pages.py compares page and code.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _ext import choosing, goodput, tables
from sordino._core import variables
from sordino.report.tables import table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from timings import frontier as frontier_report  # noqa: E402

LOSSES = ROOT / "python" / "sordino" / "plan" / "losses.json"
_BLOCK = re.compile(r"(<!-- made: (\S+)(?: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def limits_of_results() -> dict[str, list[dict[str, Any]]]:
    """Return the limits of each result that has limits, by the name of the result."""
    paths = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    found = {path.stem: json.loads(path.read_text()).get("targets", []) for path in paths}
    return {name: limits for name, limits in found.items() if limits}


def targets() -> str:
    """Return a table of the results with limits: a link to the result, number of limits, and number that it meets."""
    rows = []
    for name, limits in limits_of_results().items():
        met = sum(one["met"] is True for one in limits)
        rows.append([f"[{name}](../benchmarks/results/{name}.md)", str(len(limits)), str(met)])
    return table(["result", "limits", "met"], rows)


def _frontier() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "frontier.json").read_text())
    return found


def frontier() -> str:
    """Return a table of the algorithms that no other one beats in both bytes and loss, most bytes first."""
    rows = _frontier()["rows"]
    lines = [
        [
            row["name"],
            f"{frontier_report.saving(row, rows):.3g}",
            f"{frontier_report.percent(row, rows):+.1f} ± {frontier_report.error(row, rows):.1f}",
        ]
        for row in reversed(frontier_report.on_frontier(rows))
    ]
    return table(["algorithm", "times fewer bytes", "loss, % above all-reduce"], lines)


def losses() -> str:
    """Return the file from which `sordino plan` cites losses."""
    cited = frontier_report.cited(_frontier())
    lines = ",\n".join(f"    {json.dumps(row)}" for row in cited["losses"])
    return f'{{\n  "training": {json.dumps(cited["training"])},\n  "losses": [\n{lines}\n  ]\n}}\n'


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


def outcomes() -> str:
    """Return tables of the outcomes of torch's own tests, from the file that tests/torch_own/survey.py writes."""
    known = json.loads((ROOT / "tests" / "torch_own" / "outcomes.json").read_text())
    by_outcome: dict[str, dict[str, list[str]]] = {"passed": {}, "skipped": {}, "failed": {}}
    for name, one in known["tests"].items():
        by_outcome[one["outcome"]].setdefault(one["reason"], []).append(name)
    counts = {outcome: sum(map(len, reasons.values())) for outcome, reasons in by_outcome.items()}
    numbers = [*map(str, counts.values()), str(sum(counts.values()))]
    parts = [f"PyTorch {known['torch']}, {known['ranks']} ranks:", table([*counts, "all"], [numbers])]
    for outcome in ("skipped", "failed"):
        if not by_outcome[outcome]:
            continue
        rows = [[reason.splitlines()[-1], str(len(names))] for reason, names in by_outcome[outcome].items()]
        rows.sort(key=lambda row: -int(row[1]))
        parts += [f"Reasons of the {outcome} tests:", table(["reason", "tests"], rows)]
    names = [f"`{name.removeprefix('test_')}`" for tests in by_outcome["passed"].values() for name in tests]
    passed = textwrap.fill(", ".join(names) + ".", 120, break_on_hyphens=False, break_long_words=False)
    return "\n\n".join([*parts, "Passed:", passed])


MAKERS: dict[str, Callable[..., str]] = {
    "algorithms": tables.overview,
    "choosing": choosing.markdown,
    "configuration": configuration,
    "costs": tables.costs,
    "frontier": frontier,
    "goodput": goodput.markdown,
    "idea": tables.idea,
    "options": tables.options,
    "outcomes": outcomes,
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
    if not LOSSES.exists() or LOSSES.read_text() != losses():
        LOSSES.write_text(losses())
        print(LOSSES.relative_to(ROOT))
