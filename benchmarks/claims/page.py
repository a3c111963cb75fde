"""docs/claims.md and its pictures: every claim played once more over the runs that are committed, and told in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from claims import catalogue, running
from claims.claim import Claim, Found
from claims.evidence import DIRECTION, HOLDS, VERDICTS, Evidence
from sordino.errors import UsageError
from sordino.report import pictures, records
from sordino.report.tables import table

_NOT_RUN = "not run yet"
_BEGINNING = """# What the papers claim, and what was found

Sordino stands on five papers. Each figure, table and headline sentence of theirs is a row here: what the source says,
what runs here, and whether it holds. `make claims-quick` tries all of it in small,
`python -m benchmarks.claims run NAME` settles one claim, and this page is made from `benchmarks/results/claims/` by
`python -m benchmarks.claims report`.

**How a verdict is reached.** A claim is cut into statements, each with a verdict of its own. The first is its
headline and gives the claim's verdict; some are not the source's, and stand there to explain. Seeds share initial
values and the order of the data across algorithms, so a difference is taken seed by seed: its mean, ± its standard
error, and in brackets the number of seeds. *Holds*: beyond two standard errors of the limit (0, where none is given).
*Holds in direction*: so too, but surely less than half of the source's effect. *Does not hold*: beyond two standard
errors on the other side. *Not told apart*: within two standard errors. *Points* are percentage points. A training has
*collapsed* if its loss is not finite or ends where it began, or if it knows less than half of what others do; such
trainings are counted, not averaged in.

**What was made smaller.** There is a machine with two cores, no GPU, and data sets of small images. Models and numbers
of workers are smaller, data are Fashion-MNIST and scikit-learn's digits, and hosts are emulated where links matter.
What a claim compares is kept: the same algorithms on the same data, at the source's ratios of workers, batches and
intervals. So a difference's direction and order can be settled here, its size in a large network cannot."""


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _ours(one: Evidence) -> str:
    if one.ours is None:
        return "–"
    error = "" if one.error is None else f" ± {one.error:.2g}"
    collapsed = f", {one.collapsed} collapsed" if one.collapsed else ""
    count = f" ({one.count}{collapsed})" if one.count > 1 or collapsed else ""
    return f"{_figure(one.ours)}{error}{count}"


def evidence_table(evidence: Sequence[Evidence]) -> str:
    """Return the evidence of one claim as Markdown, with its notes below."""
    rows = [[one.what, _figure(one.source), _ours(one), one.verdict] for one in evidence]
    notes = [f"- {one.what}: {one.note}" for one in evidence if one.note]
    text = table(["Statement", "Source", "Here", "Verdict"], rows)
    return "\n\n".join([text, "\n".join(notes)]) if notes else text


def found_of(claim: Claim, results: Path) -> Found | None:
    """Return what the committed runs of a claim say; None if there are none.

    Raises:
        UsageError: they are not what the command makes now.
    """
    known = running.read(results / f"{claim.name}.json")
    return running.replay(claim, known)[0] if known else None


def verdict_of(claim: Claim, results: Path) -> str:
    """Return a claim's verdict in a word or two."""
    try:
        found = found_of(claim, results)
    except UsageError:
        return "to be run again"
    return found.evidence[0].verdict if found else _NOT_RUN


def markdown(founds: dict[str, Found | None]) -> str:
    """Return the whole page, of what was found by claims' names."""
    rows = []
    for claim in catalogue.CLAIMS:
        found = founds[claim.name]
        title = f"[{claim.paper.short}, {claim.place}](#{claim.name})"
        if found is None:
            rows.append([title, claim.says, "–", _NOT_RUN, "–"])
            continue
        one = found.evidence[0]
        hold = sum(each.verdict in (HOLDS, DIRECTION) for each in found.evidence)
        here = f"{one.what}: {_ours(one)}"
        rows.append([title, claim.says, here, f"**{one.verdict}**", f"{hold} of {len(found.evidence)} hold"])
    heads = ["Claim", "What it says", "Its headline, and what was found", "Verdict", "Statements"]
    blocks = [_BEGINNING, "## At a glance", _tally(founds), table(heads, rows, texts=len(heads))]
    for paper in catalogue.PAPERS.values():
        blocks += [f"## {paper.title}", f"**The idea.** {paper.idea}", f"**Here.** {paper.smaller}"]
        for claim in catalogue.CLAIMS:
            if claim.paper is paper:
                blocks += _section(claim, founds[claim.name])
    return "\n\n".join(blocks) + "\n"


def _tally(founds: dict[str, Found | None]) -> str:
    """Return how many claims of each source have which verdict, as Markdown."""
    counts: dict[str, Counter[str]] = {paper.short: Counter() for paper in catalogue.PAPERS.values()}
    for claim in catalogue.CLAIMS:
        found = founds[claim.name]
        counts[claim.paper.short][found.evidence[0].verdict if found else _NOT_RUN] += 1
    total = sum(counts.values(), Counter())
    heads = [one for one in (*VERDICTS, _NOT_RUN) if total[one]]
    rows = [
        [name, str(count.total()), *(str(count[one]) for one in heads)]
        for name, count in (*counts.items(), ("all", total))
    ]
    return table(["Claims of", "number", *heads], rows)


def _section(claim: Claim, found: Found | None) -> list[str]:
    blocks = [
        f'<a id="{claim.name}"></a>\n\n### {claim.place}',
        f"**{claim.paper.speaker}.** {claim.says} {claim.setting}",
    ]
    blocks.append(f"**Here.** {claim.here} `python -m benchmarks.claims run {claim.name}`")
    if found is None:
        return [*blocks, f"*{_NOT_RUN.capitalize()}.*"]
    blocks += [evidence_table(found.evidence), claim.why]
    if claim.draw is not None:
        blocks.append(f"![{claim.place}](../benchmarks/results/claims/{claim.name}.png)")
    return blocks


def publish(results: Path, docs: Path) -> Path:
    """Write the page and, where matplotlib is installed, the pictures; return the page's path."""
    founds = {claim.name: found_of(claim, results) for claim in catalogue.CLAIMS}
    for claim in catalogue.CLAIMS:
        found = founds[claim.name]
        if found is not None and claim.draw is not None:
            path = results / f"{claim.name}.png"
            if not pictures.draw(claim.draw, found.shapes, path):
                records.log(f"no {path.name}: matplotlib is not installed (pip install matplotlib)")
    path = docs / "claims.md"
    path.write_text(markdown(founds), encoding="utf-8")
    return path
