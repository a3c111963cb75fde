"""Definition of a planted error."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]

KINDS = (
    "wrong weight",
    "off by one",
    "lost message",
    "swapped rank",
    "missing wait",
    "missing check",
    "wrong order of summation",
    "dropped state in a checkpoint",
    "quorum of one too few",
    "stale copy",
    "forgotten rollback",
    "wrong bucket",
    "wrong stream",
    "misaligned access",
)
# Tests in which ranks, as threads, are killed at chosen and at random moments.
KILLS = (
    "tests/faults/test_kill_in_exchanges.py tests/faults/test_kill_in_operations.py tests/faults/test_kill_refit.py "
    "tests/faults/test_random_against_reference.py",
)


@dataclass(frozen=True)
class Error:
    """A small error, as an engineer might make it.

    Attributes:
        kind: one of `KINDS`.
        file: path from the root of the tree.
        text: the code to replace; it occurs exactly once in the file.
        becomes: the code that replaces it.
        caught_by: the tests that must find it: names of ctest ("cpp.test_consensus") and arguments of pytest
            ("tests/python/torch/test_lars.py -k momentum"), to be run in this order.
    """

    name: str
    kind: str
    file: str
    text: str
    becomes: str
    caught_by: tuple[str, ...]

    @property
    def native(self) -> bool:
        """Whether the error needs a compilation."""
        return self.file.startswith(("csrc/", "CMakeLists.txt"))

    @property
    def fingerprint(self) -> str:
        """Text that differs if the error or its tests are other ones."""
        return sha256(repr(astuple(self)).encode()).hexdigest()[:16]

    def plant(self, source: str) -> str:
        """Return the file's text with the error in it.

        Raises:
            ValueError: `text` does not occur exactly once.
        """
        found = source.count(self.text)
        if found != 1:
            raise ValueError(f"{self.name}: {self.file} has this {found} times, and not once: {self.text}")
        return source.replace(self.text, self.becomes)


def checks(words: str) -> str:
    """Return the checks with these words (of pytest's -k), in the worlds in which `make test` runs them."""
    files = "tests/python/test_sim_checks.py tests/python/test_device_checks.py tests/mp/test_process_checks.py"
    return f"{files} -k '{words}'"


def tests(module: str, words: str = "") -> str:
    """Return the tests of a module of tests/python; with `words`, only tests that match them."""
    [path] = (_ROOT / "tests" / "python").rglob(f"test_{module}.py")
    return path.relative_to(_ROOT).as_posix() + (f" -k '{words}'" if words else "")
