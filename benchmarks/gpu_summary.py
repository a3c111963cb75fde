"""What gpu_check.sh has found, in one page: `python gpu_summary.py LOGS OUT` writes OUT/summary.md. Exit status 1 if
anything failed.

It imports nothing of Sordino, for the build may have failed. Neither host names nor absolute paths get into the page.
"""

from __future__ import annotations

import csv
import json
import platform
import re
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_TAIL, _NAMES = 12, 15  # lines of a failed stage's log, and names of failed tests, that are shown


def cleaned(text: str) -> str:
    """Without absolute paths, which are cut to their last part, and without the host's name."""
    text = re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", text)
    host = platform.node()
    return re.sub(rf"\b{re.escape(host)}\b", "host", text) if len(host) > 2 else text


def facts(logs: Path) -> list[str]:
    """The machine and the versions, a line each."""
    found = []
    gpus = logs / "gpus.csv"
    if gpus.exists():
        for name, driver, memory in csv.reader(gpus.read_text().splitlines(), skipinitialspace=True):
            found.append(f"GPU: {name}, {memory}, driver {driver}")
    if not found:
        found.append("GPU: none")
    nvcc = (logs / "nvcc.txt").read_text().strip() if (logs / "nvcc.txt").exists() else ""
    found.append(f"CUDA compiler: {nvcc or 'none'}")
    mpi = (logs / "mpi.txt").read_text().splitlines() if (logs / "mpi.txt").exists() else []
    found.append(f"MPI: {mpi[0].strip() if mpi else 'none'}")
    packages = []
    for name in ("torch", "numpy", "pybind11", "mpi4py", "pytest"):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            packages.append(f"no {name}")
    found.append(f"Python {platform.python_version()}; {', '.join(packages)}")
    found.append(f"{platform.system()} {platform.release()}, {platform.machine()}")
    return found


def tests(path: Path) -> tuple[str, list[str]]:
    """What a JUnit file says: the counts, and what failed and why."""
    try:
        suites = list(ElementTree.parse(path).iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return "", []
    count = {key: sum(int(one.get(key, 0)) for one in suites) for key in ("tests", "failures", "errors", "skipped")}
    bad = count["failures"] + count["errors"]
    failed = []
    for case in (case for suite in suites for case in suite.iter("testcase")):
        problem = next((one for one in case if one.tag in ("failure", "error")), None)
        if problem is not None:
            said = (problem.get("message") or "").strip().splitlines()
            failed.append(f"{case.get('name')}: {said[0] if said else ''}"[:300])
    passed = count["tests"] - bad - count["skipped"]
    return f"{passed} passed, {bad} failed, {count['skipped']} skipped", failed


def benchmarks(out: Path) -> list[str]:
    """The verdicts on the benchmarks' targets, a line each."""
    lines = []
    for path in sorted(out.glob("gpu_*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        for one in results.get("targets", []):
            verdict = {True: "met", False: "MISSED", None: "not measured"}[one["met"]]
            value = "–" if one["value"] is None else f"{one['value']:.3g}"
            sign = "≥" if one["at_least"] else "≤"
            lines.append(f"{results['name']}: {one['what']}: {value} ({sign} {one['limit']:g}): {verdict}")
        lines += [f"{results['name']}: WRONG RESULT: {one}" for one in results.get("wrong", [])]
    return lines


def summarize(logs: Path, out: Path) -> tuple[str, bool]:
    """The page, and whether nothing failed."""
    stages = [line.split("\t") for line in (logs / "stages.tsv").read_text().splitlines()]
    rows, details = [], []
    for name, status, seconds, remark in stages:
        counts, failed = tests(logs / f"{name}.xml")
        if status == "passed" and counts.startswith("0 passed"):
            status, remark = "failed", "nothing was run"
        rows.append(f"| {name} | {status} | {seconds} s | {'; '.join(part for part in (counts, remark) if part)} |")
        if status != "failed":
            continue
        details.append(f"### {name}")
        details += [f"- `{line}`" for line in failed[:_NAMES]]
        if len(failed) > _NAMES:
            details.append(f"- and {len(failed) - _NAMES} more")
        if not failed and (logs / f"{name}.log").exists():
            tail = (logs / f"{name}.log").read_text(errors="replace").splitlines()[-_TAIL:]
            details += ["```", *tail, "```"]
    fine = bool(stages) and not details
    verdict = "Nothing failed." if fine else "**Something failed.**"
    left_out = [name for name, status, _, _ in stages if status == "left out"]
    if left_out:
        verdict += f" Left out: {', '.join(left_out)}."
    blocks = ["# Sordino on a GPU", verdict, "\n".join(f"- {line}" for line in facts(logs))]
    blocks.append("\n".join(["| Stage | | Time | |", "| --- | --- | ---: | --- |", *rows]))
    if details:
        blocks += ["## What failed", "\n".join(details)]
    verdicts = benchmarks(out)
    if verdicts:
        blocks += ["## Benchmarks", "\n".join(f"- {line}" for line in verdicts)]
    return cleaned("\n\n".join(blocks)) + "\n", fine


def main() -> int:
    """Writes the page."""
    logs, out = Path(sys.argv[1]), Path(sys.argv[2])
    text, fine = summarize(logs, out)
    (out / "summary.md").write_text(text, encoding="utf-8")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
