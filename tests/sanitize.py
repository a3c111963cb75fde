"""Build everything with a sanitizer and run the C++ tests: `python tests/sanitize.py thread address`.

`thread` is ThreadSanitizer. `address` is AddressSanitizer and UndefinedBehaviorSanitizer; it also runs some checks on
ranks as threads, in a Python with the sanitized extension. Run it from the repository root with the virtual
environment's cmake and ninja on PATH, as `make sanitize` does. Its exit status is non-zero if a sanitizer reported
something or a test failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {"thread": "thread", "address": "address,undefined"}
# These C++ tests have one thread, and take minutes under ThreadSanitizer.
SINGLE_THREADED = "consensus|arena|cuda|kernels|negotiation|unchanged"
# Checks that move much data, in worlds of one node and of several.
CHECKS = "(allreduce or gossip or process_sets or repeated) and (sim-3- or sim-5x2-)"
CHECKS_LIMIT = 900
# At most one job per core. With sanitizers, more than 4 jobs may not fit into memory.
JOBS = str(min(4, os.cpu_count() or 1))
# No detect_stack_use_after_return: with it, GCC before 14 puts vectors of 64 bytes at unaligned addresses (GCC bug
# 110027).
OPTIONS = {
    "TSAN_OPTIONS": f"halt_on_error=1:second_deadlock_stack=1:suppressions={ROOT}/tests/thread_sanitizer.supp",
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def run(what: str, command: list[str], environment: dict[str, str] | None = None, limit: float | None = None) -> bool:
    begin = time.monotonic()
    try:
        status = subprocess.run(command, cwd=ROOT, env=os.environ | (environment or {}), timeout=limit).returncode
    except subprocess.TimeoutExpired:
        status = -1
    print(f"sanitize: {what}: {'ok' if status == 0 else 'FAILED'}, {time.monotonic() - begin:.0f} s", flush=True)
    return status == 0


def build(name: str, tree: Path) -> bool:
    """Configure and build; for `thread`, only the targets of the C++ tests."""
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(tree), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"),
        *("-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1", "-DSORDINO_TESTS=ON", "-DSORDINO_CUDA=OFF"),
        f"-DSORDINO_SANITIZE={FLAGS[name]}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={output(sys.executable, '-m', 'pybind11', '--cmakedir')}",
    ]
    target = "cpp_tests" if name == "thread" else "all"
    return run(f"{name}: configure", configure) and run(
        f"{name}: build", ["cmake", "--build", str(tree), "--target", target, "--", "-j", JOBS]
    )


def run_cpp_tests(name: str, tree: Path) -> bool:
    command = ["ctest", "--test-dir", str(tree), "--output-on-failure", "-j", JOBS, "--timeout", "600"]
    if name == "thread":
        command += ["-E", SINGLE_THREADED]
    return run(f"{name}: C++ tests", command, OPTIONS)


def run_checks(tree: Path) -> bool:
    """Run checks with the sanitized extension in a copy of the package, which the interpreter finds first.

    The interpreter itself is not sanitized, so the sanitizer's runtime library is preloaded. Leaks are ignored, because
    Python and PyTorch do not free all memory before they end.
    """
    staging = tree / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(ROOT / "python" / "sordino", staging / "sordino")
    if not run("address: install", ["cmake", "--install", str(tree), "--prefix", str(staging)]):
        return False
    compiler = os.environ.get("CXX", "g++")
    # The interpreter links neither library. At its start the sanitizer looks for exception functions in libstdc++.
    preloaded = [output(compiler, f"-print-file-name={library}") for library in ("libasan.so", "libstdc++.so.6")]
    environment = {
        **OPTIONS,
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(staging),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    loaded = "import sys, sordino._core as core; sys.exit(not core.__file__.startswith(sys.argv[1]))"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/python/test_sim_checks.py"]
    return run("address: the extension", [sys.executable, "-c", loaded, str(staging)], environment) and run(
        "address: checks on ranks as threads", [*pytest, "--tier", "all", "-k", CHECKS], environment, CHECKS_LIMIT
    )


def sanitize(name: str) -> bool:
    tree = ROOT / "build" / f"sanitize-{name}"
    clean = build(name, tree) and run_cpp_tests(name, tree)
    return clean and (name != "address" or run_checks(tree))


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in FLAGS]
    if unknown or not names:
        print(f"sanitize: say one or more of {', '.join(FLAGS)}", file=sys.stderr)
        return 2
    found = [name for name in names if not sanitize(name)]
    print(f"sanitize: {'found something: ' + ', '.join(found) if found else 'clean: ' + ', '.join(names)}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
