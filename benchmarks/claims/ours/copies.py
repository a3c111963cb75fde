"""Speed of element-wise kernels against copies of as many bytes."""

from __future__ import annotations

from claims.claim import Claim, Found, Plan, Run
from claims.evidence import below
from claims.papers import SORDINO
from sordino.bench import kernels
from sordino.report import Results

SIZE, TIMES, LIMIT = 64 << 20, 3, 1.15
_BUDGET = 0.4  # seconds per kernel and dtype


def ratios(size: int, number: int) -> Results:
    """Time all kernels against copies in one run; return each one's worst ratio. `number` tells runs apart."""
    worst: dict[str, float] = {}
    for row in kernels.measure(size, _BUDGET, lambda name: True):
        worst[row["kernel"]] = max(worst.get(row["kernel"], 0.0), row["ratio"])
    return {"ratios": worst}


def plan(quick: bool) -> Plan:
    """Time all kernels, several times."""
    size, times = (1 << 20, 2) if quick else (SIZE, TIMES)
    found = yield [
        Run("claims.ours.copies:ratios", {"size": size, "number": number}, alone=True) for number in range(times)
    ]
    worst = [max(one["ratios"].values()) for one in found]
    evidence = [below(f"The slowest kernel over a copy, below {LIMIT:g}", worst, LIMIT)]
    for name in found[0]["ratios"]:
        evidence.append(below(f"{name}, its slowest dtype", [one["ratios"][name] for one in found], LIMIT))
    return Found(evidence)


CLAIM = Claim(
    name="sordino-kernels",
    paper=SORDINO,
    place="Kernels at copy speed",
    says="Each element-wise kernel takes at most 1.15 times as long as a copy that reads and writes as many bytes.",
    setting="All dtypes, integers and bool included.",
    here="64 MiB per tensor on one core. The copies are torch's and numpy's, the faster of the two, in the same run.",
    plan=plan,
    why="The slowest kernel with its slowest dtype takes 6 % longer than a copy of as many bytes. Some kernels are "
    "faster than a copy.",
)
