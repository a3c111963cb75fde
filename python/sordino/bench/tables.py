"""The Markdown reports."""

from __future__ import annotations

from sordino.bench import common, heats
from sordino.bench.common import Results, format_bytes, format_seconds, table

FUSION = {"plain": "no communication", "sordino": "Sordino", "horovod": "Horovod", "gloo": "DDP-gloo"}


def _head(results: Results, title: str, what: str) -> list[str]:
    lines = [f"# {title}", what, f"Machine: {common.describe_machine(results['machine'])}"]
    notes = results.get("baselines", {})
    if notes:
        lines.append("Baselines: " + "; ".join(f"{name} {note}" for name, note in notes.items()) + ".")
    return lines


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def collectives(results: Results) -> str:
    """All-reduce: targets, ratios, times, speeds."""
    rows = results["rows"]
    what = (
        f"In-place all-reduce of float32 by {results['ranks']} ranks on {results['nodes']} node(s). Median of the "
        "slowest rank's times, contestants interleaved. MPI sums only; the others average. The floor is what the "
        "memory traffic of an in-place average takes on private memory, without any communication. Horovod races in a "
        "second heat of the same run, with Sordino beside it, because MPI is slower in all processes from its init on."
    )
    wrong = heats.wrong(rows)
    others = [name for name in ("mpi", "gloo", "horovod") if any(heats.shared_by(row, name) for row in rows)]
    pairs = [(key, other) for key in ("arena", "ordinary") for other in others]
    ratios = [
        [format_bytes(row["bytes"])]
        + [_times(heats.ratio(row, key, "floor")) for key in ("arena", "ordinary")]
        + [_times(heats.ratio(row, other, key)) for key, other in pairs]
        for row in rows
    ]
    heads = ["Size", "arena / floor", "ordinary / floor", *[f"{heats.LABELS[other]} / {key}" for key, other in pairs]]
    blocks = [
        *_head(results, "All-reduce", what),
        f"**Wrong results: {', '.join(wrong)}.**" if wrong else "Every contestant's result was checked at every size.",
        "## Targets",
        common.target_table(results["targets"]),
        "## Ratios (over the floor: less is better; of baselines: more is better)",
        table(heads, ratios),
    ]
    for heat, title in ((heats.WITHOUT, "without Horovod loaded"), (heats.BESIDE, "beside Horovod")):
        names = [name for name in heats.LABELS if any(name in row[heat] for row in rows)]
        if not names:
            continue
        times = [
            [format_bytes(row["bytes"]), *[format_seconds(row[heat][one]["median"]) for one in names]] for row in rows
        ]
        speeds = [
            [format_bytes(row["bytes"])]
            + [f"{row[heat][one]['algbw']:.2f} / {row[heat][one]['busbw']:.2f}" for one in names]
            for row in rows
        ]
        columns = ["Size", *[heats.LABELS[name] for name in names]]
        blocks += [f"## Median time, {title}", table(columns, times)]
        blocks += [f"## algbw / busbw in GB/s, {title}", table(columns, speeds)]
    return "\n\n".join(blocks)


def _modes(results: Results) -> list[tuple[str, Results]]:
    titles = {"True": "zero_grad(set_to_none=True), PyTorch's default", "False": "zero_grad(set_to_none=False)"}
    return [(titles[key], mode) for key, mode in results["modes"].items()]


def fusion(results: Results) -> str:
    """DistributedOptimizer: exposed communication, or the overhead at one rank."""
    ranks = results["ranks"]
    what = (
        f"One training step on a ResNet-50-shaped set of {results['tensors']} tensors "
        f"({results['parameters'] / 1e6:.1f} M parameters), {ranks} rank(s), "
        f"{results['compute_ms']:g} ms of computation in backward, which takes "
        f"{format_seconds(results['backward']['median'])} in all without communication. "
        + (
            "Exposed communication is a step with communication less one without, in the same round of the same run."
            if ranks > 1
            else "The overhead is what the wrapper adds to the step of the optimizer that it wraps."
        )
    )
    blocks = [*_head(results, "Fused gradient averaging" if ranks > 1 else "Overhead at one rank", what)]
    blocks += ["## Targets", common.target_table(results["targets"], unit="×" if ranks > 1 else " %")]
    for title, mode in _modes(results):
        rows = []
        for heat, label in ((heats.WITHOUT, "{}"), (heats.BESIDE, "{} (beside Horovod)")):
            race = mode[heat]
            for key, one in race.items():
                cells = [FUSION[key] if key == "horovod" else label.format(FUSION[key])]
                cells.append(format_seconds(one["step"]["median"]))
                if key == "plain":
                    rows.append([*cells, "–", "–", "–"])
                    continue
                exposed, base = one["exposed"], race["sordino"]["exposed"]["median"]
                spread = f"{format_seconds(exposed['q1'])} … {format_seconds(exposed['q3'])}"
                against = _times(exposed["median"] / base if base > 0 else None)
                rows.append([*cells, format_seconds(exposed["median"]), spread, against])
        heads = ["", "Step", "Exposed" if ranks > 1 else "Overhead", "Quartiles", "Against Sordino"]
        blocks += [f"## {title}", table(heads, rows)]
        if mode["failed"]:
            blocks.append("Failed: " + "; ".join(f"{FUSION[key]}: {text}" for key, text in mode["failed"].items()))
    return "\n\n".join(blocks)


def kernels(results: Results) -> str:
    """Kernels: time over that of a copy of the same bytes."""
    what = (
        "One core. Each kernel against the fastest of torch's and numpy's copies that read and write as many bytes in "
        "all, interleaved in one run. A ratio of 1 is as fast as copying."
    )
    blocks = [*_head(results, "Kernels", what), "## Targets", common.target_table(results["targets"])]
    kinds = list(dict.fromkeys(row["kernel"] for row in results["rows"]))
    for size in dict.fromkeys(row["bytes"] for row in results["rows"]):
        rows = {(row["kernel"], row["dtype"]): row for row in results["rows"] if row["bytes"] == size}
        lines = []
        for dtype in dict.fromkeys(dtype for _, dtype in rows):
            cells = [f"{rows[kind, dtype]['ratio']:.2f}" if (kind, dtype) in rows else "–" for kind in kinds]
            lines.append([dtype, *cells])
        blocks += [f"## {format_bytes(size)} a tensor: time / copy", table(["dtype", *kinds], lines)]
        speeds = [one["gbps"] for one in rows.values()]
        blocks.append(f"Speeds: {min(speeds):.1f} to {max(speeds):.1f} GB/s read and written.")
    return "\n\n".join(blocks)
