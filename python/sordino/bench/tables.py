"""Markdown reports of the benchmarks."""

from __future__ import annotations

from sordino.report import Results, verdicts
from sordino.report.tables import format_bytes, format_seconds, table

FUSION = {
    "plain": "no communication",
    "sordino": "Sordino",
    "waits in step": "Sordino, waiting in step()",
    "horovod": "Horovod",
    "gloo": "DDP-gloo",
    "backend": "DDP over Sordino",
    "buckets": "DDP over Sordino, SharedBuckets",
}


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _modes(results: Results) -> list[tuple[str, Results]]:
    titles = {"True": "zero_grad(set_to_none=True), PyTorch's default", "False": "zero_grad(set_to_none=False)"}
    return [(titles[key], mode) for key, mode in results["modes"].items()]


def fusion(results: Results) -> str:
    """Return the report on DistributedOptimizer: exposed communication, or the overhead at one rank."""
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
    blocks = [*verdicts.opening(results, "Fused gradient averaging" if ranks > 1 else "Overhead at one rank", what)]
    blocks += ["## Targets", verdicts.target_table(results["targets"], unit="×" if ranks > 1 else " %")]
    for title, mode in _modes(results):
        base = mode["contestants"]["sordino"]["exposed"]["median"]
        rows = []
        for key, one in mode["contestants"].items():
            cells = [FUSION[key], format_seconds(one["step"]["median"])]
            if key == "plain":
                rows.append([*cells, "–", "–", "–"])
                continue
            exposed = one["exposed"]
            spread = f"{format_seconds(exposed['q1'])} … {format_seconds(exposed['q3'])}"
            against = _times(exposed["median"] / base if base > 0 else None)
            rows.append([*cells, format_seconds(exposed["median"]), spread, against])
        heads = ["", "Step", "Exposed" if ranks > 1 else "Overhead", "Quartiles", "Against Sordino"]
        blocks += [f"## {title}", table(heads, rows)]
        if mode["failed"]:
            blocks.append("Failed: " + "; ".join(f"{FUSION[key]}: {text}" for key, text in mode["failed"].items()))
    return "\n\n".join(blocks)


def kernels(results: Results) -> str:
    """Return the report on kernels: their time relative to a copy of the same bytes."""
    what = (
        "One core. Each kernel against the fastest of torch's and numpy's copies that read and write as many bytes in "
        "all, interleaved in one run. A ratio of 1 is as fast as copying."
    )
    blocks = [*verdicts.opening(results, "Kernels", what), "## Targets", verdicts.target_table(results["targets"])]
    kernels = list(dict.fromkeys(row["kernel"] for row in results["rows"]))
    for size in dict.fromkeys(row["bytes"] for row in results["rows"]):
        rows = {(row["kernel"], row["dtype"]): row for row in results["rows"] if row["bytes"] == size}
        lines = []
        for dtype in dict.fromkeys(dtype for _, dtype in rows):
            cells = [f"{rows[kernel, dtype]['ratio']:.2f}" if (kernel, dtype) in rows else "–" for kernel in kernels]
            lines.append([dtype, *cells])
        blocks += [f"## {format_bytes(size)} a tensor: time / copy", table(["dtype", *kernels], lines)]
        speeds = [one["gbps"] for one in rows.values()]
        blocks.append(f"Speeds: {min(speeds):.1f} to {max(speeds):.1f} GB/s read and written.")
    return "\n\n".join(blocks)
