"""Check figures in prose: each is a link to a key of a file in benchmarks/results, and must agree with its value.

    [565 ms](../benchmarks/results/transports_allreduce.json#rows/hosts=2&mbps=1000/contestants/mpi/median)
    [9](../benchmarks/results/transports_loss.json#contestants/mpi/median "ms") to ...

Each step of a path is one of: a key; the index in a list; `key=value&key=value`, the element of a list that has these
values; `*`, all elements, of which the median counts. `a:b` is a quotient. A figure agrees if the cited value, in the
figure's unit, rounds to it. In a paragraph that links a result every measured figure must have such a link. On the site
these links lead to the page of the result.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

UNITS = {"": 1.0, "times": 1.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "min": 60.0, "%": 1e-2, "MB": 1e6, "MiB": 2.0**20}
_RESULT = re.compile(r"benchmarks/results/[\w/]+\.(?:md|json)")
_CITED = re.compile(r"(benchmarks/results/[\w/]+)\.json#(?:[^\s()\"]|\([^\s()\"]*\))*")
_FIGURE = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)\s*(\S*)")
_MEASURED = re.compile(r"(?<![\w.,])\d[\d.,]*\s?(?:ms|µs|s|%|times)(?!\w)")


class Citation(NamedTuple):
    """A figure, the file and the key that it cites, and its unit if the text does not contain it."""

    text: str
    target: str
    unit: str


def value(found: Any, path: str) -> float:
    """Return the number at a path.

    Raises:
        LookupError: the path leads to no value, or to one that is not a number.
    """
    if ":" in path:
        one, other = (value(found, part) for part in path.split(":"))
        return one / other
    values = [found]
    for step in path.split("/"):
        values = [down for one in values for down in _down(one, step)]
    if not values or not all(isinstance(one, (int, float)) for one in values):
        raise LookupError(f"the value at {path} is not a number")
    return float(statistics.median(values))


def _down(found: Any, step: str) -> list[Any]:
    if step == "*":
        return list(found.values() if isinstance(found, dict) else found)
    if isinstance(found, dict):
        return [found[step]]
    if step.isdecimal():
        return [found[int(step)]]
    wanted = dict(one.split("=", 1) for one in step.split("&"))
    matching = [one for one in found if all(f"{one.get(key)}" == text for key, text in wanted.items())]
    if len(matching) != 1:
        raise LookupError(f"{len(matching)} elements have {step}")
    return matching


def agrees(text: str, unit: str, number: float) -> bool:
    """Return whether a number rounds to the figure in a text, such as "1.4 µs", "91.27 %" or "21,000".

    Raises:
        LookupError: the text is not a figure in a known unit.
    """
    said = _FIGURE.fullmatch(text.strip())
    if said is None or (said[2] or unit) not in UNITS:
        raise LookupError(f"{text!r} is not a figure, or its unit is not one of {', '.join(filter(None, UNITS))}")
    digits = said[1].replace(",", "")
    decimals = len(digits.partition(".")[2])
    return abs(number / UNITS[said[2] or unit] - float(digits)) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


def problems(page: Path, text: str) -> list[str]:
    """Return the problems of the figures of a page of Markdown."""
    found = []
    for block in MarkdownIt().parse(text):
        if block.type != "inline":
            continue
        said, citations = _flat(block.children or [])
        for one in citations:
            file, _, path = one.target.partition("#")
            try:
                number = value(json.loads((page.parent / file).read_text()), path)
                if not agrees(one.text, one.unit, number):
                    found.append(f"{page.name}: {one.text!r} cites {one.target}, which is {number:.6g}")
            except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
                found.append(f"{page.name}: {one.text!r} cites {one.target}: {error}")
        for figure in _MEASURED.findall(said) if _RESULT.search(said) else ():
            found.append(f"{page.name}: {figure!r} cites no result, in: {said.strip()[:80]}")
    return found


def _flat(tokens: list[Token]) -> tuple[str, list[Citation]]:
    """Return a paragraph with the targets of its links but without its citations; and these citations."""
    said, target, unit, inside = "", "", "", ""
    citations: list[Citation] = []
    for token in tokens:
        if token.type == "link_open":
            target, unit, inside = str(token.attrs["href"]), str(token.attrs.get("title", "")), ""
        elif token.type == "link_close":
            if ".json#" in target:
                citations.append(Citation(inside, target.replace("%C2%B5", "µ"), unit))
                inside = ""
            said += f" {inside} {target} "
            target = ""
        elif token.type in ("text", "softbreak"):
            words = token.content or " "
            said, inside = (said, inside + words) if target else (said + words, inside)
    return said, citations


def on_the_site(text: str) -> str:
    """Return a page whose citations lead to the pages of the results."""
    return _CITED.sub(r"\1.md", text)
