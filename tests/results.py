"""Reader of JSON results of benchmarks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

ResultsOf = Callable[[str], dict[str, Any]]


def read(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of the JSON file `name` in `folder`. Check that it has no paths of this machine, and that the
    report can be made from it alone."""
    path = folder / f"{name}.json"
    text = path.read_text()
    assert str(Path.home()) + "/" not in text
    assert sys.prefix not in text
    before = path.with_suffix(".md").read_text()
    path.with_suffix(".md").unlink()
    assert report.main([str(path)]) == 0
    assert path.with_suffix(".md").read_text() == before
    found: dict[str, Any] = json.loads(text)
    return found
