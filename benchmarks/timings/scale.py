"""Table and plot of messages and bytes by the number of ranks."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def markdown(results: Results) -> str:
    """Return the counts as Markdown."""
    rows = results["rows"]
    what = (
        f"Ranks as threads of one process, on simulated nodes of {results['node']}. In each phase: what the average "
        "rank sends (and the one that sends most). The exponent says how the average grows with the number of ranks: 0 "
        f"is not at all, {results['logarithm']:.2f} is as its logarithm, 1 is in proportion."
    )
    names = list(dict.fromkeys(phase["phase"] for row in rows for phase in row["phases"]))
    by_name = [{phase["phase"]: phase for phase in row["phases"]} for row in rows]
    grown = {one["phase"]: one for one in results["growth"]}

    def cells(name: str, key: str, form: Any) -> list[str]:
        found = []
        for phases in by_name:
            one = phases.get(name)
            found.append("not run" if one is None else f"{form(one[key])} ({form(one[f'most_{key}'])})")
        exponent = grown[name][key] if name in grown else None
        return [name, *found, "–" if exponent is None else f"{exponent:.2f}"]

    heads = ["Phase", *(f"{row['ranks']:,} ranks" for row in rows), "exponent"]
    totals = [
        ["seconds in all", *(f"{row['seconds']:.1f}" for row in rows)],
        ["memory of a rank", *(f"{row['memory'] / 2**20:.1f} MiB" for row in rows)],
    ]
    return "\n\n".join(
        [
            *verdicts.head(results, "Scale", what, unit=""),
            "## Messages",
            table(heads, [cells(name, "messages", _number) for name in names]),
            "## Bytes",
            table(heads, [cells(name, "bytes", _number) for name in names]),
            "## Time and memory",
            table(heads[:-1], totals),
        ]
    )


def draw(results: Results, figure: Any) -> None:
    """Draw the messages of the average rank in each phase."""
    axes = figure.subplots()
    sizes = [row["ranks"] for row in results["rows"]]
    for one in results["growth"]:
        counts = [
            next((phase["messages"] for phase in row["phases"] if phase["phase"] == one["phase"]), None)
            for row in results["rows"]
        ]
        axes.plot(sizes, counts, "o-", label=one["phase"])
    axes.set(xscale="log", yscale="symlog", xlabel="ranks", ylabel="messages of the average rank")
    axes.legend(fontsize=6)


REPORTS = {"scale": Report(markdown, draw)}
