"""What the docstring of an algorithm says, taken apart: its idea, the facts that each states, and its settings.

A docstring names its facts by the same words everywhere ("Sent per step and worker:", "Staleness:", ...), so they can
be laid beside each other, and one that lacks some is an error of the site.
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
class Told:
    """A docstring.

    Attributes:
        idea: paragraphs of Markdown.
        facts: what is said of each of these, by name.
    """

    idea: list[str]
    facts: dict[str, str]

    @property
    def sent(self) -> tuple[str, str]:
        """What is sent: per what, and how much."""
        return next((name, text) for name, text in self.facts.items() if _SENT.match(name))


def told(kind: type[Algorithm]) -> Told:
    """Return what the docstring of an algorithm says.

    Raises:
        LookupError: it lacks a fact.
    """
    text = inspect.cleandoc(kind.__doc__ or "").split("\nAttributes:\n")[0]
    paragraphs = [" ".join(one.split()) for one in text.split("\n\n")]
    begin = next((k for k, one in enumerate(paragraphs) if _FACT.match(one)), len(paragraphs))
    pieces = _FACT.split(" ".join(paragraphs[begin:]))[1:]
    facts = {name: said[1:].strip() for name, said in zip(pieces[::2], pieces[1::2])}
    missing = [name for name in NEEDED if name not in facts]
    if missing or not any(map(_SENT.match, facts)):
        raise LookupError(f"the docstring of {kind.__name__} does not say: {', '.join(missing) or 'what is sent'}")
    return Told(paragraphs[:begin], facts)


def settings(kind: type) -> list[tuple[str, str, str]]:
    """Return name, default and meaning of each field of a dataclass.

    Raises:
        LookupError: no docstring says what a field means.
    """
    meanings: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        meanings |= _meanings(inspect.cleandoc(one.__dict__.get("__doc__") or ""))
    found = []
    for field in dataclasses.fields(kind):
        if field.name not in meanings:
            raise LookupError(f"no docstring says what {kind.__name__}.{field.name} means")
        default = "needed" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        found.append((field.name, default, meanings[field.name]))
    return found


def _meanings(docstring: str) -> dict[str, str]:
    """Return the entries of a section "Attributes:"."""
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
    """Return the names of the algorithms of this package."""
    return [name for name in names() if class_of(name).__module__.startswith("sordino.")]
