"""A claim is a generator: it asks for runs, is sent what they found, and returns the evidence.

So one that chooses learning rates first and then trains many seeds reads from top to bottom; and since a run is named
by its settings, asking again costs nothing: the page is made by playing every claim once more over the runs that are
kept.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from claims.evidence import Evidence
from sordino.report import Results

Figure = Any
"""A figure of matplotlib's, which need not be installed."""


@dataclass(frozen=True)
class Run:
    """One piece of work: a function of this folder's and its settings.

    Attributes:
        work: "module:function". It is called with the settings as keywords, and returns results of JSON's types.
        settings: of JSON's types.
        cost: how long it takes, compared with other runs.
        alone: nothing else may run meanwhile, because it measures time.
    """

    work: str
    settings: Results
    cost: float = 1.0
    alone: bool = False

    @property
    def key(self) -> str:
        """The name under which what it found is kept."""
        text = json.dumps([self.work, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def carry_out(self) -> Results:
        """Do it; what was found."""
        module, _, name = self.work.partition(":")
        found: Results = getattr(importlib.import_module(module), name)(**self.settings)
        return found


@dataclass(frozen=True)
class Found:
    """What a claim returns.

    Attributes:
        evidence: the first is the claim's headline, whose verdict is the claim's.
        shapes: what its picture is drawn from, of JSON's types.
    """

    evidence: Sequence[Evidence]
    shapes: Results = field(default_factory=dict)


@dataclass(frozen=True)
class Paper:
    """A source.

    Attributes:
        name: in commands.
        short: how a table calls it.
        title: heads its part of the page.
        idea: what it proposes, for those who have not read it, and the words and letters that its claims use.
        smaller: what was made smaller for all of its claims, and why that is fair.
        speaker: who claims it.
    """

    name: str
    short: str
    title: str
    idea: str
    smaller: str
    speaker: str = "The source"


Plan = Generator[Sequence[Run], list[Results], Found]


@dataclass(frozen=True)
class Claim:
    """A figure, a table or a headline sentence of a source.

    Attributes:
        name: in commands and files.
        paper: the source.
        place: in the source, such as "Figure 7".
        says: what the source says, in a sentence with its numbers.
        setting: what the source did.
        here: what runs here.
        plan: makes a new generator; the argument asks for a small one, of minutes, that judges nothing.
        why: what to make of the evidence, in a paragraph.
        draw: the picture, of `Found.shapes`.
    """

    name: str
    paper: Paper
    place: str
    says: str
    setting: str
    here: str
    plan: Callable[[bool], Plan]
    why: str
    draw: Callable[[Results, Figure], None] | None = None


def play(claim: Claim, quick: bool, find: Callable[[Sequence[Run]], list[Results]]) -> Found:
    """Play a claim to its end; `find` gives what the runs found that it asks for."""
    plan = claim.plan(quick)
    try:
        wanted = next(plan)
        while True:
            wanted = plan.send(find(wanted))
    except StopIteration as end:
        found: Found = end.value
        return found
