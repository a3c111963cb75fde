"""Show which lines of the CUDA code, and which functions of CUDA that it calls, the tests on the stand-in execute:

    python tests/cuda_on_cpu/executed.py [--tree build/tree] [--lines]

Builds the library once more, with counters, and runs the C++ tests of this folder with it. With `--lines` it lists the
lines that no test has executed. The status is 1 below 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAST = 0.95
LIBRARY = "sordino_cuda_on_cpu_counted"
TESTS = ("test_cuda_kernels_on_cpu", "test_cuda_device_on_cpu")
FOLDERS = ("csrc/kernels/cuda", "csrc/device/cuda")

Lines = dict[str, dict[int, bool]]
"""For each file its lines with code, and whether they were executed."""


def run(*command: str, **variables: str) -> str:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def execute(tree: Path, calls: Path) -> None:
    """Build the library and the tests, and run the tests."""
    run("cmake", "--build", str(tree), "--target", LIBRARY, *TESTS)
    home = tree / "tests" / "cuda_on_cpu"
    for counts in (home / "CMakeFiles" / f"{LIBRARY}.dir").rglob("*.gcda"):
        counts.unlink()
    for test in TESTS:
        run(str(home / test), LD_LIBRARY_PATH=str(home / "counted"), CUDA_ON_CPU_CALLS=str(calls))


def executed_lines(tree: Path) -> Lines:
    """Return the lines of the files in `FOLDERS`. A line of a template counts as executed if one instance was."""
    found: Lines = defaultdict(dict)
    objects = (tree / "tests" / "cuda_on_cpu" / "CMakeFiles" / f"{LIBRARY}.dir").resolve()
    for counts in objects.rglob("*.gcda"):
        report = json.loads(run("gcov", "--json-format", "--stdout", str(counts)))
        for file in report["files"]:
            path = Path(os.path.normpath(tree / file["file"]))
            name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
            if name.startswith(FOLDERS):
                lines = found[name]
                for line in file["lines"]:
                    number = line["line_number"]
                    lines[number] = lines.get(number, False) or line["count"] > 0
    return found


def called_functions(tree: Path, calls: Path) -> dict[str, bool]:
    """Return the functions of CUDA that the library uses, and whether a test has called each of them."""
    library = tree / "tests" / "cuda_on_cpu" / "counted" / "libsordino_cuda.so"
    names = set(re.findall(r"\bU (cuda\w+)", run("nm", "-D", str(library))))
    names |= {"cudaLaunchKernel"}  # a macro in the stand-in
    for folder in FOLDERS:
        for path in (ROOT / folder).iterdir():
            names |= set(re.findall(r'find_in_driver\("(\w+)"', path.read_text()))
    counted: set[str] = set()
    for file in calls.iterdir():
        counted |= {line.split()[0] for line in file.read_text().splitlines()}
    return {name: name in counted for name in sorted(names)}


def share(executed: list[bool]) -> float:
    return sum(executed) / len(executed) if executed else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT / "build" / "tree", help="folder of the build")
    parser.add_argument("--lines", action="store_true", help="list the lines that no test has executed")
    options = parser.parse_args()
    tree = options.tree.resolve()
    with tempfile.TemporaryDirectory() as folder:
        execute(tree, Path(folder))
        functions = called_functions(tree, Path(folder))
    lines = executed_lines(tree)
    print(f"{'file':45} {'lines':>6} {'executed':>9}")
    for name, numbers in sorted((name, numbers) for name, numbers in lines.items() if numbers):
        print(f"{name:45} {len(numbers):6} {share(list(numbers.values())):9.1%}")
        missing = [number for number, executed in sorted(numbers.items()) if not executed]
        if options.lines and missing:
            print("    not executed: " + ", ".join(map(str, missing)))
    all_lines = [executed for numbers in lines.values() for executed in numbers.values()]
    print(f"{'all lines':45} {len(all_lines):6} {share(all_lines):9.1%}")
    print(f"{'functions of CUDA':45} {len(functions):6} {share(list(functions.values())):9.1%}")
    missing_functions = [name for name, called in functions.items() if not called]
    if missing_functions:
        print("    not called: " + ", ".join(missing_functions))
    return 0 if min(share(all_lines), share(list(functions.values()))) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
