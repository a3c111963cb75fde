"""Papers, claims and their runs.

The plan of a claim is a generator: it asks for runs by yielding them, is sent their results, and returns the evidence.
So a plan that first chooses learning rates and then trains many seeds reads from top to bottom. A plan that asks for a
run again, by the same function and settings, gets the kept result. So the pages are made by playing all plans again.
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
"""A matplotlib figure; matplotlib need not be installed."""


@dataclass(frozen=True)
class Run:
    """One measurement or training: a function and its settings.

    Attributes:
        work: "module:function". It is called with the settings as keywords and returns JSON values.
        settings: JSON values.
        cost: duration relative to other runs, to estimate the remaining time.
        alone: True for runs that measure time: other runs wait.
    """

    work: str
    settings: Results
    cost: float = 1.0
    alone: bool = False

    @property
    def key(self) -> str:
        """Hash of function and settings; name of the file that keeps the result."""
        text = json.dumps([self.work, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def carry_out(self) -> Results:
        """Call the function and return its result."""
        module, _, name = self.work.partition(":")
        found: Results = getattr(importlib.import_module(module), name)(**self.settings)
        return found


@dataclass(frozen=True)
class Found:
    """Result of a plan.

    Attributes:
        evidence: judged statements. The first is the headline; its verdict is the claim's.
        shapes: data of the picture, as JSON values.
    """

    evidence: Sequence[Evidence]
    shapes: Results = field(default_factory=dict)


@dataclass(frozen=True)
class Paper:
    """A source.

    Attributes:
        name: name in commands and file names.
        short: name in tables.
        title: heading of its page.
        idea: summary of its proposal, and the terms and symbols that its claims use.
        smaller: differences between the source's experiments and ours that all of its claims share, with reasons.
        speaker: the claiming party, as the page names it.
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
        name: name in commands and file names.
        paper: the source.
        place: place in the source, such as "Figure 7".
        says: the claim in a sentence, with its numbers.
        setting: experiment of the source.
        here: experiment here.
        plan: function that returns a new plan; with the argument True a small plan of a few minutes, whose verdicts
            mean nothing.
        why: interpretation of the evidence, one paragraph.
        draw: function that draws the picture from `Found.shapes`.
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
    """Play the plan of a claim to its end. `find` returns the results of the runs that the plan asks for."""
    plan = claim.plan(quick)
    try:
        wanted = next(plan)
        while True:
            wanted = plan.send(find(wanted))
    except StopIteration as end:
        found: Found = end.value
        return found
