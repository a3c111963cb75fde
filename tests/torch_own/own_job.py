"""The processes that run torch's own tests (own_rank.py), as seen by the tests that ask for them."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
OUTCOMES = _FOLDER / "outcomes.json"  # of all tests; survey.py writes it
LIMIT_S = 150.0  # of one test; on an idle machine the longest takes 5 s, and the first one 5 s more


class Job:
    """Ranks that run one test after another. They are started again after a failure.

    Args:
        size: number of ranks.
        folder: folder for the files of the tests.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self._size, self._folder = size, folder
        self._ranks: list[subprocess.Popen[str]] = []
        self._results: list[Any] = []
        self._turns = 0

    def run(self, name: str) -> dict[str, str]:
        """Run a test on all ranks, and return its outcome: passed, skipped or failed, and the reason."""
        if not self._ranks:
            self._start()
        folder = Path(tempfile.mkdtemp(prefix=f"{self._turns}-", dir=self._folder))
        self._turns += 1
        for part in ("barrier", "test_dir", "init_dir"):  # as torch's test case makes them
            (folder / part).mkdir()
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{name} {folder}\n")
            rank.stdin.flush()
        outcomes = self._outcomes()
        failed = [f"rank {rank}: {one['reason']}" for rank, one in enumerate(outcomes) if one["outcome"] == "failed"]
        if failed:
            self.end()
            return {"outcome": "failed", "reason": "\n".join(failed)}
        return outcomes[0]

    def _start(self) -> None:
        self._results = []
        for rank in range(self._size):
            ours, theirs = os.pipe()
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, str(_FOLDER / "own_rank.py"), str(rank), str(self._size), str(theirs)],
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, pass_fds=(theirs,),
                    stderr=None if os.environ.get("SORDINO_TEST_LOUD") else subprocess.DEVNULL,
                )
            )  # fmt: skip
            os.close(theirs)
            self._results.append(os.fdopen(ours))

    def _outcomes(self) -> list[dict[str, str]]:
        late = {"outcome": "failed", "reason": f"no outcome within {LIMIT_S:g} s"}
        outcomes, end = [late] * self._size, time.monotonic() + LIMIT_S
        with selectors.DefaultSelector() as waiting:
            for rank, results in enumerate(self._results):
                waiting.register(results, selectors.EVENT_READ, rank)
            while waiting.get_map() and (left := end - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    line = self._results[key.data].readline()
                    ended = {"outcome": "failed", "reason": "the process has ended without an outcome"}
                    outcomes[key.data] = json.loads(line) if line else ended
                    waiting.unregister(key.fileobj)
                    if outcomes[key.data]["outcome"] == "failed":  # the others may wait for it, but not for long
                        end = min(end, time.monotonic() + 5)
        return outcomes

    def end(self) -> None:
        """End the processes."""
        for rank, results in zip(self._ranks, self._results):
            rank.kill()
            rank.wait()
            assert rank.stdin is not None
            rank.stdin.close()
            results.close()
        self._ranks = []
