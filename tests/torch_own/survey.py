"""Run all of torch's own tests of backends, and write their outcomes: `python tests/torch_own/survey.py [WORDS]`.

The outcomes go to outcomes.json, from which docs/torch-own-tests.md is made (`python docs/make_pages.py`). With WORDS,
only tests run whose names contain one of them, and outcomes are printed instead. `--list` prints the names of all
tests, each with the reason why it cannot run on this machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import own_suite
import torch
from own_job import OUTCOMES, Job


def main(words: list[str]) -> int:
    """Return the number of failures."""
    if words == ["--list"]:
        print(json.dumps({name: own_suite.static_skip(name) for name in own_suite.names()}))
        return 0
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = Job(own_suite.SIZE, Path(folder))
        for name in own_suite.names():
            if words and not any(word in name for word in words):
                continue
            begin = time.monotonic()
            reason = own_suite.static_skip(name)
            found[name] = {"outcome": "skipped", "reason": reason} if reason else job.run(name)
            print(f"{found[name]['outcome']:8} {time.monotonic() - begin:5.1f} s  {name}", flush=True)
            if found[name]["outcome"] == "failed" or words:
                print(found[name]["reason"], flush=True)
        job.end()
    if not words:
        told = {"torch": torch.__version__.partition("+")[0], "ranks": own_suite.SIZE, "tests": found}
        OUTCOMES.write_text(json.dumps(told, indent=1) + "\n")
    return sum(one["outcome"] == "failed" for one in found.values())


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
