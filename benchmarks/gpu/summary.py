"""Page about a check: `python -m benchmarks.gpu.summary FOLDER` makes FOLDER/summary.md from the JSON files there.

It imports nothing of Sordino, because the build may have failed. The page has neither host names nor absolute paths.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

TAIL, NAMES = 12, 15  # shown lines of a failed stage's log, and names of failed tests
NOT_YET = "# Nothing has run on a GPU yet"
INSTEAD = (
    "These results are without a GPU (`gpu_check.sh --dry`): of simulated devices, or of the host instead of them."
)
_OUTCOME = re.compile(r"^(?:\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)(?= |$)", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S*::.*)$", re.MULTILINE)
_COLLECTED = re.compile(r"(\d+)(?:/\d+)? tests? collected")
_CTEST = re.compile(r"^\d+% tests passed, (\d+) tests failed out of (\d+)", re.MULTILINE)


def cleaned(text: str) -> str:
    """Return the text with absolute paths cut to their last part, and without the host's name."""
    text = re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", text)
    host = platform.node()
    return re.sub(rf"\b{re.escape(host)}\b", "host", text) if len(host) > 2 else text


def told_by(log: str) -> dict[str, Any]:
    """Return counts, failures and last lines of a log of pytest or ctest. The log may be incomplete."""
    outcomes = Counter(_OUTCOME.findall(log))
    counts = {
        "passed": outcomes["PASSED"],
        "failed": outcomes["FAILED"] + outcomes["ERROR"],
        "skipped": outcomes["SKIPPED"],
    }
    if ctest := _CTEST.search(log):
        bad, total = map(int, ctest.groups())
        counts = {"passed": total - bad, "failed": bad, "skipped": 0}
    found: dict[str, Any] = {"tail": [cleaned(line) for line in log.splitlines()[-TAIL:]]}
    if any(counts.values()):
        found["counts"] = counts
    elif collected := _COLLECTED.search(log):
        found["counts"] = {"collected": int(collected[1])}
    if failures := [cleaned(line)[:300] for line in _FAILED.findall(log)]:
        found["failures"] = failures
    return found


def benchmarks(folder: Path) -> list[str]:
    """Return the verdicts of the benchmarks' targets, one line each."""
    lines = []
    for path in sorted(folder.glob("gpu_*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        for one in results.get("targets", []):
            verdict = {True: "met", False: "MISSED", None: "not measured"}[one["met"]]
            value = "–" if one["value"] is None else f"{one['value']:.3g}"
            sign = "≥" if one["at_least"] else "≤"
            lines.append(f"{results['name']}: {one['what']}: {value} ({sign} {one['limit']:g}): {verdict}")
        lines += [f"{results['name']}: WRONG RESULT: {one}" for one in results.get("wrong", [])]
    return lines


def title(results: dict[str, Any]) -> str:
    """Return the heading of the page, with the GPUs on which stages have run."""
    if results["dry"]:
        return f"{NOT_YET}\n\n{INSTEAD}"
    ran = [one for one in results["stages"].values() if one["status"] not in ("left out", "not reached")]
    gpus = list(dict.fromkeys(one["machine"] for one in ran if one.get("machine")))
    return f"# Sordino on {' and '.join(gpus)}" if gpus else NOT_YET


def facts(found: dict[str, Any]) -> str:
    """Return the latest call's machine as a Markdown list."""
    driver = f", driver {found['driver']}" if found["driver"] else ""
    gpus = [f"GPU: {gpu}{driver}" for gpu in found["gpus"]] or ["GPU: none"]
    lines = [*gpus, f"CUDA compiler: {found['nvcc']}", f"MPI: {found['mpi']}"]
    lines += [f"Python {found['python']}; {', '.join(found['packages'])}", found["system"]]
    return "\n".join(f"- {line}" for line in lines)


def verdict(entries: dict[str, Any]) -> str:
    """Return a sentence per status with the names of its stages."""
    having = {
        status: ", ".join(name for name, one in entries.items() if one["status"] == status)
        for status in ("passed", "failed", "under way", "left out", "not reached")
    }
    said = f"Passed: {having['passed'] or 'nothing'}."
    said += f" **Failed: {having['failed']}.**" if having["failed"] else ""
    said += f" **Ended while under way: {having['under way']}.**" if having["under way"] else ""
    said += f" Left out: {having['left out']}." if having["left out"] else ""
    return said + (f" **Not reached: {having['not reached']}.**" if having["not reached"] else "")


def row(name: str, one: dict[str, Any]) -> str:
    """Return a stage's row of the table."""
    counts = ", ".join(f"{count} {what}" for what, count in one.get("counts", {}).items())
    remark = "; ".join(part for part in (counts, one["remark"]) if part)
    return f"| {name} | {one['status']} | {one['seconds']:.0f} s | {remark} |"


def details(name: str, one: dict[str, Any]) -> list[str]:
    """Return the failed tests of a stage, or the end of its log."""
    failures = one.get("failures", [])
    lines = [f"### {name}", *(f"- `{line}`" for line in failures[:NAMES])]
    if len(failures) > NAMES:
        lines.append(f"- and {len(failures) - NAMES} more")
    return lines if failures else [*lines, "```", *one.get("tail", []), "```"]


def page(results: dict[str, Any], verdicts: list[str]) -> str:
    """Return the page."""
    entries = results["stages"]
    blocks = [title(results), verdict(entries), facts(results["machine"])]
    rows = [row(name, one) for name, one in entries.items()]
    blocks.append("\n".join(["| Stage | | Time | |", "| --- | --- | ---: | --- |", *rows]))
    failed = [line for name, one in entries.items() if one["status"] == "failed" for line in details(name, one)]
    if failed:
        blocks += ["## Failures", "\n".join(failed)]
    if verdicts:
        blocks += ["## Benchmarks", "\n".join(f"- {line}" for line in verdicts)]
    return cleaned("\n\n".join(blocks)) + "\n"


def write(folder: Path) -> None:
    """Write the page about the check in a folder."""
    results = json.loads((folder / "check.json").read_text(encoding="utf-8"))
    (folder / "summary.md").write_text(page(results, benchmarks(folder)), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
