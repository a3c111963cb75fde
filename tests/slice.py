"""Run one part of all tests: `slice.py k/M`. All M parts together are `make test-all` and `make sanitize`.

The tests are distributed by name (selection.py). A sanitizer is not divided: part 1 runs ThreadSanitizer, and the part
in the middle (M/2 + 1) runs AddressSanitizer. On x86-64, the last part counts the lines of CUDA code that tests
execute.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from selection import part

TESTS = Path(__file__).resolve().parent


def main() -> int:
    """Run the part; return the status of the first failure."""
    if len(sys.argv) != 2:
        print("slice.py: which part? Write k/M, such as: make test-slice PART=1/12", file=sys.stderr)
        return 2
    try:
        number, parts = part(sys.argv[1])
    except ValueError as error:
        print(f"slice.py: {error}", file=sys.stderr)
        return 2
    at_a_time = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]  # as in the Makefile
    commands = [[sys.executable, "-m", "pytest", "-q", *at_a_time, "--slice", sys.argv[1], str(TESTS)]]
    for sanitizer, its_part in (("thread", 1), ("address", parts // 2 + 1)):
        if number == its_part:
            commands.append([sys.executable, str(TESTS / "sanitize.py"), sanitizer])
    if number == parts and platform.machine() == "x86_64":
        commands.append([sys.executable, str(TESTS / "cuda_on_cpu" / "executed.py")])
    statuses = [subprocess.run(command, check=False).returncode for command in commands]
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
