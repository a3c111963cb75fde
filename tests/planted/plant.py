"""Plant one error after the other in a copy of the source tree, and show which tests catch it.

    python tests/planted/plant.py [WORDS...] [--copies N] [--tier all] [--json FILE]

Words select errors by their names and files. The copies and their builds stay in build/planted, so the next run
compiles only files that have changed since. The status is 1 if fewer than 95 % of the errors are caught.

A whole run takes hours. The file of --json is written after each error, and says for each at which commit it was tried.
A run with an existing file leaves out errors that are in it as caught, and have not changed since; with --again, none.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from planted.catalogue import ERRORS  # noqa: E402
from planted.error import Error  # noqa: E402
from planted.tree import Copy, Outcome, Stopped  # noqa: E402
from sordino.report import machines  # noqa: E402

LEAST = 0.95  # share of errors that must be caught
SPARE_S = 60  # additional time limit of a command, beyond four times its duration without an error


class Results:
    """Outcomes in a file that is rewritten after each one (without a file if `None`)."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._commit = machines.commit()
        self._lock = Lock()
        self._rows: dict[str, dict[str, object]] = {}  # by fingerprint
        self.outcomes: dict[str, Outcome] = {}  # by name
        if file is not None and file.exists():
            rows = {row["fingerprint"]: row for row in json.loads(file.read_text())["errors"]}
            for error in ERRORS:
                if (row := rows.get(error.fingerprint)) is not None:
                    self._rows[error.fingerprint] = row
                    self.outcomes[error.name] = Outcome(row["caught"], row["by"], row["seconds"])

    def add(self, error: Error, outcome: Outcome) -> None:
        """Take an outcome, print it, and write the file."""
        with self._lock:
            self.outcomes[error.name] = outcome
            about = {"name": error.name, "kind": error.kind, "file": error.file, "fingerprint": error.fingerprint}
            self._rows[error.fingerprint] = about | {"commit": self._commit} | asdict(outcome)
            verdict = "caught" if outcome.caught else "NOT caught"
            print(f"{verdict:10} {outcome.seconds:6.1f} s  {error.name} ({error.kind}): {outcome.by}", flush=True)
            if self._file is not None:
                part = self._file.with_name(self._file.name + ".part")
                part.write_text(json.dumps(self._told(), indent=1) + "\n")
                part.replace(self._file)

    def _told(self) -> dict[str, object]:
        rows = [self._rows[error.fingerprint] for error in ERRORS if error.fingerprint in self._rows]
        caught = sum(bool(row["caught"]) for row in rows)
        return {"benchmark": "planted", "caught": caught, "of": len(rows), "errors": rows}


class Trials:
    """Errors that are still to be tried. A copy takes all errors of one file, then those of another."""

    def __init__(self, errors: Sequence[Error], results: Results) -> None:
        # The errors of one file follow each other, so that only that file is compiled again.
        ordered = sorted(errors, key=lambda error: (not error.native, error.file))
        self._groups = iter([list(group) for _, group in groupby(ordered, key=lambda error: error.file)])
        self._results = results
        self._lock = Lock()
        self._sound: dict[str, Outcome] = {}

    def work(self, copy: Copy) -> None:
        """Try errors in a copy until no errors are left, or until the copy's commands are stopped."""
        try:
            copy.refresh()
            for error in self._taken():
                self._results.add(error, self._try(copy, error))
        except Stopped:
            pass

    def _taken(self) -> Iterator[Error]:
        while True:
            with self._lock:
                group = next(self._groups, None)
            if group is None:
                return
            yield from group

    def _try(self, copy: Copy, error: Error) -> Outcome:
        for command in error.caught_by:
            if command not in self._sound:
                if not copy.build([command]):
                    raise SystemExit(f"{command} does not compile without an error")
                self._sound[command] = copy.test(command, 600)
            if self._sound[command].caught:
                return Outcome(False, f"fails without an error: {self._sound[command].by}")
        began = time.monotonic()
        found = Outcome(False, "")
        with copy.planted(error):
            if not copy.build(error.caught_by):
                return Outcome(False, "does not compile, so nobody could make this error", time.monotonic() - began)
            for command in error.caught_by:
                found = copy.test(command, SPARE_S + 4 * self._sound[command].seconds)
                if found.caught:
                    break
        return Outcome(found.caught, found.by, time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="only errors with one of these in their names or files")
    parser.add_argument("--copies", type=int, default=1, help="copies of the tree in which errors are tried at once")
    parser.add_argument("--tier", choices=("quick", "all"), default="quick", help="of the tests (tests/selection.py)")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--again", action="store_true", help="try errors again that the file has")
    options = parser.parse_args()
    chosen = options.words or [""]
    errors = [error for error in ERRORS if any(word in error.name or word in error.file for word in chosen)]
    if not errors:
        raise SystemExit("no error has such a name")
    results = Results(options.json)
    done = set() if options.again else {name for name, outcome in results.outcomes.items() if outcome.caught}
    trials = Trials([error for error in errors if error.name not in done], results)
    jobs = max(1, (os.cpu_count() or 1) // options.copies)
    copies = [Copy(ROOT / "build" / "planted" / str(number), options.tier, jobs) for number in range(options.copies)]
    with ThreadPoolExecutor(len(copies)) as pool:
        working = [pool.submit(trials.work, copy) for copy in copies]
        try:
            for work in working:
                work.result()
        finally:
            for copy in copies:
                copy.commands.stop()
    caught = sum(results.outcomes[error.name].caught for error in errors)
    print(f"{caught} of {len(errors)} errors are caught: {caught / len(errors):.0%}")
    for error in errors:
        if not results.outcomes[error.name].caught:
            print(f"NOT caught: {error.name}, in {error.file}")
    return 0 if caught >= LEAST * len(errors) else 1


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a script in the background ignores SIGINT
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
