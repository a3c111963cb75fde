"""Execution of the runs that claims ask for, and the files that keep their results.

Each run is carried out once, and its result is kept under its key. An interrupted run begins again. Runs that do not
measure time share all cores. The results of a claim are written to one JSON file, one line per run; the pages are made
from these files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from claims.claim import Claim, Found, Run, play
from sordino.errors import UsageError
from sordino.report import Results, machines, records

Entry = Results
"""A finished run: `work`, `settings`, `found` (its result) and `on` (the machine)."""


def entry_of(run: Run, on: str) -> Entry:
    """Carry out a run with one torch thread, in this process: one of the pool, or for runs `alone` the main process."""
    torch.set_num_threads(1)
    found = run.carry_out()
    return {"work": run.work, "settings": run.settings, "found": _short(found), "on": on}


def _short(value: Any) -> Any:
    """Return the value with all floats rounded to six digits, to keep files small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list | tuple) else value


def read(path: Path) -> dict[str, Entry]:
    """Return the finished runs in a claim's file by their keys; an empty dict if the file does not exist.

    Raises:
        UsageError: it is not a claim's file.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        entries = [one | {"on": found["machines"][one["on"]]} for one in found["runs"]]
        return {Run(one["work"], one["settings"]).key: one for one in entries}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is not a claim's file ({error}); delete it, or run the claim again") from error


def write(path: Path, claim: Claim, entries: Sequence[Entry]) -> None:
    """Write a claim's file atomically, one line per run, so that a diff shows the changed runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    on = sorted({one["on"] for one in entries})
    lines = [json.dumps(one | {"on": on.index(one["on"])}, ensure_ascii=False) for one in entries]
    head = json.dumps({"claim": claim.name, "machines": on}, ensure_ascii=False)[1:-1]
    half = path.with_suffix(".json.part")
    half.write_text(f'{{{head}, "runs": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")
    half.replace(path)


class Runner:
    """Supplies the results of runs, and carries out the runs that have no result yet.

    Args:
        kept: folder for the results of single runs, which outlast an interruption.
        processes: pool for runs that do not measure time.
    """

    def __init__(self, kept: Path, processes: ProcessPoolExecutor) -> None:
        self._kept, self._processes = kept, processes
        on = machines.machine(None)
        sordino = f"Sordino {on['sordino']}" + (f" ({on['commit']})" if on["commit"] else "")
        self._on = f"{on['cpu']}, {on['cores']} cores, torch {on['torch']}, {sordino}, {on['date'][:10]}"

    def settle(self, claim: Claim, quick: bool, known: dict[str, Entry]) -> tuple[Found, list[Entry]]:
        """Play a claim and carry out its runs; return its result, and all runs in the order in which it asked for them.

        Args:
            claim: the claim.
            quick: whether to play the small plan.
            known: finished runs, such as those in the claim's file.
        """
        used: dict[str, Entry] = {}

        def find(wanted: Sequence[Run]) -> list[Results]:
            entries = {run.key: run for run in wanted}
            found = {key: one for key in entries if (one := known.get(key) or self._read(key)) is not None}
            missing = [run for key, run in entries.items() if key not in found]
            if found and missing:
                records.log(f"{claim.name}: {len(found)} of {len(entries)} runs are done already")
            for run, entry in self._carry_out(claim, missing):
                found[run.key] = entry
            used.update((key, found[key]) for key in entries)
            return [found[run.key]["found"] for run in wanted]

        return play(claim, quick, find), list(used.values())

    def _read(self, key: str) -> Entry | None:
        path = self._kept / f"{key}.json"
        try:
            entry = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
            whole = isinstance(entry, dict) and Run(entry["work"], entry["settings"]).key == key and "found" in entry
        except (ValueError, LookupError, TypeError, RecursionError):  # then the run is carried out again
            return None
        return entry if whole else None

    def _carry_out(self, claim: Claim, missing: Sequence[Run]) -> list[tuple[Run, Entry]]:
        done: list[tuple[Run, Entry]] = []
        begin, ahead = time.monotonic(), sum(run.cost for run in missing)
        behind = 0.0

        def finished(run: Run, entry: Entry) -> None:
            nonlocal ahead, behind
            records.write({"name": run.key} | entry, self._kept)
            done.append((run, entry))
            ahead, behind = ahead - run.cost, behind + run.cost
            left = (time.monotonic() - begin) / behind * ahead / 60
            said = ", ".join(f"{key} {value}" for key, value in run.settings.items() if not isinstance(value, dict))
            records.log(f"{claim.name} [{len(done)}/{len(missing)}] {said}; about {left:.1f} min left")

        together = [run for run in missing if not run.alone]
        futures = {self._processes.submit(entry_of, run, self._on): run for run in together}
        for future in as_completed(futures):
            finished(futures[future], future.result())
        for run in missing:
            if run.alone:
                finished(run, entry_of(run, self._on))
        return done


def replay(claim: Claim, known: dict[str, Entry]) -> tuple[Found, set[str]]:
    """Play a claim with finished runs only; return its result, and the keys of the runs that it asked for.

    Raises:
        UsageError: a run is missing, so the file is older than the claim.
    """
    asked: set[str] = set()

    def find(wanted: Sequence[Run]) -> list[Results]:
        for run in wanted:
            if run.key not in known:
                raise UsageError(
                    f"the claim {claim.name} asks for a run that its file does not have: {run.work} {run.settings}; "
                    f"add it with: python -m benchmarks.claims run {claim.name}"
                )
        asked.update(run.key for run in wanted)
        return [known[run.key]["found"] for run in wanted]

    return play(claim, False, find), asked
