"""Pages and pictures of the claims, made by playing every plan with the committed runs."""

from __future__ import annotations

import textwrap
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
_WIDTH = 120  # of a line, in characters
_BEGINNING = """# Claims of the papers, and their verdicts

Sordino implements the algorithms of five papers. Each figure, table and headline sentence of theirs is a claim. A row
below has its verdict. The page of the paper has the source's statement, the experiment here, and the values.
`make claims-quick` runs all claims in small, and `python -m benchmarks.claims run NAME` runs one claim. These pages
are made from `benchmarks/results/claims/` by `python -m benchmarks.claims report`.

**Verdicts.** A claim consists of statements, each with its own verdict. The first statement is the headline and gives
the claim's verdict. Some statements are not from the source; they explain a verdict. Seeds share initial values and
the order of the data across algorithms, so a difference is taken seed by seed. Given are its mean, ± its standard
error, and in brackets the number of seeds. *Points* are percentage points.

| verdict | condition |
| --- | --- |
| holds | the mean is beyond the limit (0 if none is given) by more than two standard errors |
| holds in direction | the same, but the effect is surely less than half of the source's |
| does not hold | the mean misses the limit by more than two standard errors |
| not told apart | the mean is within two standard errors of the limit |

A training has *collapsed* if its loss is not finite or ends where it began, or if its accuracy is less than half of
that of others. Collapsed trainings are counted and left out of the mean.

**Smaller experiments.** The machine has two cores, no GPU, and data sets of small images. Models and numbers of workers
are smaller, data are Fashion-MNIST and scikit-learn's digits, and hosts are emulated where links matter. A claim
compares what the source compares: the same algorithms on the same data, at the source's ratios of workers, batches and
intervals. So the direction and the order of a difference can be settled here. Its size in a large network cannot."""


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
    """Return the evidence of one claim as a Markdown table, followed by its notes."""
    rows = [[one.what, _figure(one.source), _ours(one), one.verdict] for one in evidence]
    notes = [f"- {one.what}: {one.note}" for one in evidence if one.note]
    text = table(["Statement", "Source", "Here", "Verdict"], rows)
    return "\n\n".join([text, "\n".join(notes)]) if notes else text


def found_of(claim: Claim, results: Path) -> Found | None:
    """Return the result of a claim from its committed runs; None if no run is committed.

    Raises:
        UsageError: a run is missing, so the file is older than the claim.
    """
    known = running.read(results / f"{claim.name}.json")
    return running.replay(claim, known)[0] if known else None


def verdict_of(claim: Claim, results: Path) -> str:
    """Return a claim's verdict, or why it has none."""
    try:
        found = found_of(claim, results)
    except UsageError:
        return "to be run again"
    return found.evidence[0].verdict if found else _NOT_RUN


def pages(founds: dict[str, Found | None]) -> dict[str, str]:
    """Return the text of each page by its file in docs/: the summary, and one page per paper.

    Args:
        founds: results of the claims by their names; None for claims without committed runs.
    """
    rows = []
    for claim in catalogue.CLAIMS:
        found = founds[claim.name]
        title = f"[{claim.paper.short}, {claim.place}](claims/{claim.paper.name}.md#{claim.name})"
        held = "–"
        if found is not None:
            count = sum(each.verdict in (HOLDS, DIRECTION) for each in found.evidence)
            held = f"{count} of {len(found.evidence)}"
        rows.append([title, f"**{found.evidence[0].verdict}**" if found else _NOT_RUN, held])
    heads = ["Claim", "Verdict", "Statements that hold"]
    summary = [_BEGINNING, "## Verdicts", _tally(founds), "## All claims", table(heads, rows, texts=2)]
    texts = {"claims.md": _joined(summary)}
    for paper in catalogue.PAPERS.values():
        blocks = [f"# {paper.title}", f"**The idea.** {paper.idea}", f"**Here.** {paper.smaller}"]
        blocks.append("[Claims](../claims.md) says how a verdict is reached.")
        for claim in catalogue.CLAIMS:
            if claim.paper is paper:
                blocks += _section(claim, founds[claim.name])
        texts[f"claims/{paper.name}.md"] = _joined(blocks)
    return texts


def _joined(blocks: Sequence[str]) -> str:
    """Return the blocks as a page with wrapped paragraphs."""
    return "\n\n".join(block if block[:1] in "|#<-!" else _wrapped(block) for block in blocks) + "\n"


def _wrapped(text: str, indent: str = "") -> str:
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        textwrap.fill(one, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for one in paragraphs
    )


def _statements(evidence: Sequence[Evidence]) -> str:
    """Return the evidence of one claim as a Markdown list: statement, values, verdict, note."""
    items = []
    for one in evidence:
        values = f"{_ours(one)}; source: {_figure(one.source)}" if one.source is not None else _ours(one)
        note = f" ({one.note})" if one.note else ""
        items.append(_wrapped(f"- *{one.verdict.capitalize()}.* {one.what}: {values}{note}", "  "))
    return "\n".join(items)


def _tally(founds: dict[str, Found | None]) -> str:
    """Return the number of claims by source and verdict as a Markdown table."""
    counts: dict[str, Counter[str]] = {paper.short: Counter() for paper in catalogue.PAPERS.values()}
    for claim in catalogue.CLAIMS:
        found = founds[claim.name]
        counts[claim.paper.short][found.evidence[0].verdict if found else _NOT_RUN] += 1
    total = sum(counts.values(), Counter())
    heads = [one for one in (*VERDICTS, _NOT_RUN) if total[one]]
    numbers = (*counts.items(), ("all", total))
    rows = [[name, str(count.total()), *(str(count[one]) for one in heads)] for name, count in numbers]
    return table(["Claims of", "number", *heads], rows)


def _section(claim: Claim, found: Found | None) -> list[str]:
    blocks = [
        f'<a id="{claim.name}"></a>\n\n## {claim.place}',
        f"**{claim.paper.speaker}.** {claim.says} {claim.setting}",
        f"**Here.** {claim.here} `python -m benchmarks.claims run {claim.name}`",
    ]
    if found is None:
        return [*blocks, f"*{_NOT_RUN.capitalize()}.*"]
    blocks += [_statements(found.evidence), claim.why]
    if claim.draw is not None:
        blocks.append(f"![{claim.place}](../../benchmarks/results/claims/{claim.name}.png)")
    return blocks


def publish(results: Path, docs: Path) -> Path:
    """Write the pages and, if matplotlib is installed, the pictures; return the path of the summary."""
    founds = {claim.name: found_of(claim, results) for claim in catalogue.CLAIMS}
    for claim in catalogue.CLAIMS:
        found = founds[claim.name]
        if found is not None and claim.draw is not None:
            path = results / f"{claim.name}.png"
            if not pictures.draw(claim.draw, found.shapes, path):
                records.log(f"no {path.name}: matplotlib is not installed (pip install matplotlib)")
    (docs / "claims").mkdir(exist_ok=True)
    for name, text in pages(founds).items():
        (docs / name).write_text(text, encoding="utf-8")
    return docs / "claims.md"
