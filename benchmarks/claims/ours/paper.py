"""Sordino's own claims, in the place of a paper."""

from claims.claim import Paper

PAPER = Paper(
    "sordino",
    "Sordino",
    "Sordino: what it claims of itself",
    "What Sordino promises beside the papers' figures, as measured claims.",
    "Nothing is made smaller but the machine: two ranks on two cores. `docs/benchmarks.md` leads to more "
    "detailed results.",
    speaker="Our claim",
)
