"""Table and plot of loss against bytes sent on a small language model, and targets from published claims."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import table

_LIMIT = 1.0  # % of the loss
_SAVING, _SAVING_LIMIT = 100, 0.5  # times fewer bytes, at a loss up to this % larger


def percent(row: Results, rows: list[Results]) -> float:
    """Return the difference of a row's loss from the baseline's, in % of the baseline's loss."""
    return 100 * float(row["difference"]) / float(rows[0]["loss"])


def error(row: Results, rows: list[Results]) -> float:
    """Return the standard error of that difference, in % of the baseline's loss."""
    return 100 * float(row["standard_error"]) / float(rows[0]["loss"])


def saving(row: Results, rows: list[Results]) -> float | None:
    """Return the bytes of the baseline over the bytes of a row; None if the row sends nothing."""
    return float(rows[0]["sent_bytes"]) / float(row["sent_bytes"]) if row["sent_bytes"] else None


def targets(rows: list[Results]) -> list[Results]:
    """Compare published claims with the rows. The first row is the baseline."""
    named = {row["name"]: row for row in rows}
    found = []
    one = named.get("DiLoCo, H = 64")
    value = None if one is None else percent(one, rows)
    found.append(verdicts.target("loss of DiLoCo with H = 64 over the synchronous loss, in %", value, _LIMIT, False))
    for every in (16, 64):
        pair = [named.get(f"{name}, H = {every}") for name in ("NoLoCo", "DiLoCo")]
        value = None if None in pair else percent(pair[0], rows) - percent(pair[1], rows)  # type: ignore[arg-type]
        what = f"loss of NoLoCo over that of DiLoCo with H = {every}, in % of the synchronous loss"
        found.append(verdicts.target(what, value, 0.0, False))
    good = [factor for row in rows if (factor := saving(row, rows)) is not None and percent(row, rows) <= _SAVING_LIMIT]
    what = f"largest saving of bytes at a loss of {_SAVING_LIMIT} % or less"
    found.append(verdicts.target(what, max(good, default=None), _SAVING, True))
    return found


def cited(results: Results) -> Results:
    """Return the losses that `sordino plan` cites: of rows with as many ranks as the baseline.

    Rows with a codec that is a setting of `DistributedOptimizer`, and not of the algorithm, are left out.
    """
    rows, model = results["rows"], results["model"]
    kept = []
    for row in rows[1:]:
        codec_is_its_own = ("--compression" in row["options"]) == ("compression=" in row["written"])
        if row["ranks"] == rows[0]["ranks"] and codec_is_its_own:
            kept.append(row)
    training = (
        f"a training of a GPT with {results['parameters'] / 1e6:.1f} M parameters on {model['tokens'] / 1e6:.0f} MB of "
        f"text by {rows[0]['ranks']} workers in {results['steps']} steps (benchmarks/frontier.py)"
    )
    losses = [[row["written"], round(percent(row, rows), 2), round(error(row, rows), 2)] for row in kept]
    return {"training": training, "losses": losses}


def on_frontier(rows: list[Results]) -> list[Results]:
    """Return the rows that send bytes and that no other row beats in both bytes and loss, in the order of bytes."""
    found: list[Results] = []
    for row in sorted((row for row in rows if row["sent_bytes"]), key=lambda row: (row["sent_bytes"], row["loss"])):
        if not found or row["loss"] < found[-1]["loss"]:
            found.append(row)
    return found


def markdown(results: Results) -> str:
    """Return the losses and bytes as Markdown."""
    rows = results["rows"]
    best = {row["name"] for row in on_frontier(rows)}
    lines = []
    for row in rows:
        factor = saving(row, rows)
        lines.append(
            [
                f"**{row['name']}**" if row["name"] in best else row["name"],
                f"`{row['written']}`",
                f"{row['lr']:g}" + ("*" if row["lr"] in (results["rates"][0], results["rates"][-1]) else ""),
                f"{row['loss']:.4f}",
                f"{percent(row, rows):+.2f} ± {error(row, rows):.2f}",
                f"{row['sent_bytes'] / 1e6:.2f}",
                "–" if factor is None else f"{factor:.3g}",
            ]
        )
    model = results["model"]
    rates = ", ".join(f"{rate:g}" for rate in results["rates"])
    what = (
        f"A GPT of {results['parameters']:,} parameters is trained on {model['tokens']:,} bytes of text, in "
        f"{results['steps']:,} steps of {model['batch']} sequences of {model['context']} bytes, by 4 ranks unless a "
        f"row says otherwise. Seeds: {', '.join(map(str, results['seeds']))}. The learning rate of a row is the best "
        f"for it of {rates}, with the first seed (*: an end of this range). Loss is in nats per byte of held-out text. "
        "Differences are from all-reduce with the same seed, in % of its loss, with their standard error. Rows in "
        "bold are on the frontier: no other row has both fewer bytes and a smaller loss."
    )
    heads = ["", "algorithm", "learning rate", "loss", "difference, %", "MB sent by a rank", "times fewer bytes"]
    blocks = verdicts.head(results, "Loss against bytes", what, unit="")
    if results["failed"]:
        blocks.append(f"**Failed: {', '.join(results['failed'])}.**")
    return "\n\n".join([*blocks, table(heads, lines)])


def draw(results: Results, figure: Any) -> None:
    """Draw all rows that send bytes, and the frontier."""
    axes = figure.subplots()
    rows = [row for row in results["rows"] if row["sent_bytes"]]
    for row in rows:
        axes.errorbar(
            row["sent_bytes"], row["loss"], yerr=row["standard_error"], fmt="o", markersize=4, color="tab:blue"
        )
        axes.annotate(
            row["name"], (row["sent_bytes"], row["loss"]), fontsize=5, xytext=(3, 2), textcoords="offset points"
        )
    best = on_frontier(rows)
    axes.step([row["sent_bytes"] for row in best], [row["loss"] for row in best], where="post", color="tab:orange")
    axes.set(xscale="log", xlabel="bytes sent by a rank", ylabel="loss, nats per byte", title="The frontier")


REPORTS = {"frontier": Report(markdown, draw)}
