"""The check list of a release, each point run or looked at: `python tools/release.py [--only POINT ...] [--list]`.

It stops at the first point that fails, says what to do, and changes nothing outside of build/ and dist/: what is left
for a person to do, the tag and the upload, is printed at the end.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Wrong(Exception):
    """A point of the list does not hold; says the mend."""


def run(*words: str) -> None:
    print("+", *words, flush=True)
    if subprocess.run(words, cwd=ROOT).returncode != 0:
        raise Wrong(f"`{' '.join(words)}` failed: see above")


def said_by(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def version() -> str:
    return (ROOT / "python" / "sordino" / "VERSION").read_text().strip()


def differences(root: Path = ROOT) -> list[str]:
    """Where the version is another than python/sordino/VERSION has."""
    wanted = (root / "python" / "sordino" / "VERSION").read_text().strip()
    places = {"CHANGELOG.md": r"^## (\S+)", "CITATION.cff": r"^version: (\S+)$"}
    wrong = []
    for name, pattern in places.items():
        found = re.search(pattern, (root / name).read_text(), re.MULTILINE)
        if found is None or found[1] != wanted:
            wrong.append(f"{name} has {found[1] if found else 'no version'}, python/sordino/VERSION has {wanted}")
    return wrong


def tree() -> None:
    """Nothing is uncommitted."""
    if changed := said_by("git", "status", "--porcelain"):
        raise Wrong(f"commit or put away what has changed:\n{changed}")


def results() -> None:
    """Results that are older than their benchmarks are told; a person decides which to make again."""
    run(sys.executable, "benchmarks/provenance.py")


def versions() -> None:
    """VERSION, CHANGELOG.md and CITATION.cff agree, and the changelog has a date."""
    if wrong := differences():
        raise Wrong("; ".join(wrong))
    heading = re.search(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if heading is None or not re.search(r"\(\d{4}-\d\d-\d\d\)", heading[0]):
        raise Wrong(
            f"CHANGELOG.md: write the day of the release in its first heading, as in ## {version()} (2026-01-31)"
        )
    if f"v{version()}" in said_by("git", "tag").split():
        raise Wrong(f"v{version()} is tagged already: write the next version into python/sordino/VERSION")


def tests() -> None:
    """Every test passes, those of the exhaustive tier too (an hour)."""
    run("make", "lint")
    run("make", "test-all")


def docs() -> None:
    """The documentation builds without a warning."""
    if re.search(r"^docs:", (ROOT / "Makefile").read_text(), re.MULTILINE) is None:
        print("The Makefile has no target docs: nothing to build.")
        return
    run("make", "docs")


def wheels() -> None:
    """There is a wheel for every CPython that is here, and auditwheel agrees."""
    for old in (ROOT / "dist").glob("*.whl"):
        old.unlink()
    run("make", "wheel")


def bare() -> None:
    """The wheel installs and trains on a bare system without compiler or MPI (needs root and debootstrap)."""
    run(sys.executable, "tools/wheels/bare.py")


POINTS: dict[str, Callable[[], None]] = {
    "tree": tree,
    "results": results,
    "versions": versions,
    "tests": tests,
    "docs": docs,
    "wheels": wheels,
    "bare": bare,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=POINTS, default=list(POINTS), help="these points alone")
    parser.add_argument("--list", action="store_true", help="say what the points are, and do nothing")
    options = parser.parse_args()
    for name in options.only:
        print(f"[{name}] {POINTS[name].__doc__}", flush=True)
        if options.list:
            continue
        begin = time.monotonic()
        try:
            POINTS[name]()
        except Wrong as wrong:
            print(f"[{name}] NOT DONE: {wrong}")
            return 1
        print(f"[{name}] done in {time.monotonic() - begin:.0f} s", flush=True)
    if not options.list and options.only == list(POINTS):
        tag = f"v{version()}"
        print("All points hold. Left to you:")
        print(f"  git tag -a {tag} -m 'Sordino {version()}'\n  git push origin {tag}\n  twine upload dist/*.whl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
