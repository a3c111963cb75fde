"""Parser of the docstring of an algorithm: its idea, its facts, and its settings.

All docstrings name their facts by the same words ("Sent per step and worker:", "Staleness:", ...), so that tables can
compare algorithms. If a docstring lacks a fact, building the site fails.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import dataclass

from sordino.algorithms import Algorithm, class_of, names

NEEDED = ("Staleness", "Memory", "When a peer dies", "Source")
_SENT = re.compile(r"(?:Sent|Received) per [\w ]+$")
_FACT = re.compile(r"(?:^|(?<=[.;] ))((?:Sent|Received) per [\w ]+|Staleness|Memory|When a peer dies|Source)(?=[:,])")
_ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.*)")


@dataclass(frozen=True)
class DocstringParts:
    """The parts of a docstring.

    Attributes:
        idea: paragraphs of Markdown.
        facts: the text of each fact, by name.
    """

    idea: list[str]
    facts: dict[str, str]

    @property
    def sent(self) -> tuple[str, str]:
        """The fact about sent or received bytes: its name (with the unit), and its text (the amount)."""
        return next((name, text) for name, text in self.facts.items() if _SENT.match(name))


def parts_of(kind: type[Algorithm]) -> DocstringParts:
    """Return the parts of the docstring of an algorithm.

    Raises:
        LookupError: the docstring lacks a fact.
    """
    text = inspect.cleandoc(kind.__doc__ or "").split("\nAttributes:\n")[0]
    paragraphs = [" ".join(one.split()) for one in text.split("\n\n")]
    begin = next((k for k, one in enumerate(paragraphs) if _FACT.match(one)), len(paragraphs))
    pieces = _FACT.split(" ".join(paragraphs[begin:]))[1:]
    facts = {name: rest[1:].strip() for name, rest in zip(pieces[::2], pieces[1::2])}
    missing = [name for name in NEEDED if name not in facts]
    if missing or not any(map(_SENT.match, facts)):
        raise LookupError(f"the docstring of {kind.__name__} lacks: {', '.join(missing) or 'Sent per ...'}")
    return DocstringParts(paragraphs[:begin], facts)


def settings(kind: type) -> list[tuple[str, str, str]]:
    """Return name, default and meaning of each field of a dataclass.

    Raises:
        LookupError: the docstrings of the class and its bases lack a field.
    """
    meanings: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        meanings |= _meanings(inspect.cleandoc(one.__dict__.get("__doc__") or ""))
    found = []
    for field in dataclasses.fields(kind):
        if field.name not in meanings:
            raise LookupError(f"no docstring describes {kind.__name__}.{field.name}")
        default = "needed" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        found.append((field.name, default, meanings[field.name]))
    return found


def _meanings(docstring: str) -> dict[str, str]:
    """Return the meaning of each name in the section "Attributes:"."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in docstring.partition("\nAttributes:\n")[2].splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry:
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.startswith("        "):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        elif line.strip():
            break
    return found


def shipped() -> list[str]:
    """Return the names of Sordino's own algorithms, without plug-ins."""
    return [name for name in names() if class_of(name).__module__.startswith("sordino.")]
