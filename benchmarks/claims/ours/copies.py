"""Every element-wise kernel runs at the speed of a copy of the bytes that it touches."""

from __future__ import annotations

from claims.claim import Claim, Found, Plan, Run
from claims.evidence import below
from claims.papers import SORDINO
from sordino.bench import kernels
from sordino.report import Results

SIZE, TIMES, LIMIT = 64 << 20, 3, 1.15
_BUDGET = 0.4  # seconds a kernel and dtype


def ratios(size: int, number: int) -> Results:
    """Time all kernels against copies in the same run; the worst dtype of each. `number` tells runs apart."""
    worst: dict[str, float] = {}
    for row in kernels.measure(size, _BUDGET, lambda name: True):
        worst[row["kernel"]] = max(worst.get(row["kernel"], 0.0), row["ratio"])
    return {"ratios": worst}


def plan(quick: bool) -> Plan:
    """All kernels, several times."""
    size, times = (1 << 20, 2) if quick else (SIZE, TIMES)
    found = yield [
        Run("claims.ours.copies:ratios", {"size": size, "number": number}, alone=True) for number in range(times)
    ]
    names = list(found[0]["ratios"])
    worst = [max(one["ratios"].values()) for one in found]
    evidence = [below(f"The slowest kernel over a copy, below {LIMIT:g}", worst, LIMIT)]
    for name in names:
        evidence.append(below(f"{name}, its slowest dtype", [one["ratios"][name] for one in found], LIMIT))
    return Found(evidence)


CLAIM = Claim(
    name="sordino-kernels",
    paper=SORDINO,
    place="Kernels at copy speed",
    says="Each element-wise kernel takes at most 1.15 times as long as a copy that reads and writes as many bytes.",
    setting="All dtypes, integers and bool included.",
    here="64 MiB a tensor on one core; the copies are torch's and numpy's, the faster of the two, in the same run.",
    plan=plan,
    why="The slowest kernel, of its slowest dtype, takes 6 % longer than a copy of as many bytes; some are quicker "
    "than one.",
)
