"""What an error that is planted consists of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]

KINDS = (
    "wrong weight",
    "off by one",
    "lost message",
    "swapped rank",
    "missing wait",
    "wrong order of summation",
    "dropped state in a checkpoint",
    "quorum of one too few",
    "stale copy",
    "forgotten rollback",
    "wrong bucket",
)


@dataclass(frozen=True)
class Error:
    """A small error, as an engineer might make it.

    Attributes:
        kind: one of `KINDS`.
        file: where it is, from the root of the tree.
        text: what it replaces; in the file exactly once.
        becomes: what it replaces that by.
        caught_by: the part of the tests that must find it: names of ctest ("cpp.test_consensus") and arguments of
            pytest ("tests/python/torch/test_lars.py -k momentum"), to be run in this order.
    """

    name: str
    kind: str
    file: str
    text: str
    becomes: str
    caught_by: tuple[str, ...]

    @property
    def native(self) -> bool:
        """Whether something must be compiled for it."""
        return self.file.startswith("csrc/")

    def plant(self, source: str) -> str:
        """The file's text with the error in it.

        Raises:
            ValueError: the text is not there, or is there several times.
        """
        found = source.count(self.text)
        if found != 1:
            raise ValueError(f"{self.name}: {self.file} has this {found} times, and not once: {self.text}")
        return source.replace(self.text, self.becomes)


def checks(words: str) -> str:
    """The checks with these words (of pytest's -k), in the worlds in which `make test` runs them."""
    files = "tests/python/test_sim_checks.py tests/python/test_device_checks.py tests/mp/test_process_checks.py"
    return f"{files} -k '{words}'"


def tests(module: str, words: str = "") -> str:
    """The tests of a module of tests/python, or those with these words."""
    [path] = (_ROOT / "tests" / "python").rglob(f"test_{module}.py")
    return path.relative_to(_ROOT).as_posix() + (f" -k '{words}'" if words else "")
