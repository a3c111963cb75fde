"""Time to find a peer among 8 to 100,000 workers."""

from __future__ import annotations

from claims.claim import Claim, Found, Plan, Run
from claims.evidence import below
from claims.papers import SORDINO
from sordino.report import Results
from timings.gossip import topology

COUNTS, TIMES = (8, 1024, 65_536, 100_000), 5
_BUDGET = 0.5  # seconds


def seconds(workers: int, number: int) -> Results:
    """Time the search for both peers of a segment, its destination and its source. `number` tells runs apart."""
    step = float(topology.measure_ours(workers, _BUDGET)["median"])
    return {"seconds": step / topology.SEGMENTS}


def plan(quick: bool) -> Plan:
    """Time every number of workers, several times."""
    times = 2 if quick else TIMES
    keys = [(count, number) for number in range(times) for count in COUNTS]
    found = yield [Run("claims.ours.peers:seconds", {"workers": c, "number": k}, alone=True) for c, k in keys]
    micros = {key: 1e6 * one["seconds"] for key, one in zip(keys, found, strict=True)}
    few, many = COUNTS[0], COUNTS[-1]
    ratios = [micros[many, k] / micros[few, k] for k in range(times)]
    evidence = [below(f"{many} workers over {few}: time to find a peer, below 2", ratios, 2.0)]
    for count in COUNTS:
        what = f"{count} workers: both peers of a segment, µs from Python, below 3"
        evidence.append(below(what, [micros[count, k] for k in range(times)], 3.0))
    return Found(evidence)


CLAIM = Claim(
    name="sordino-peers",
    paper=SORDINO,
    place="Peers in constant time",
    says="Load-balanced random peers are found in constant time at any number of workers. The source's Algorithm 2 "
    "takes time that grows with the square of that number.",
    setting="No permutation is drawn: a worker computes its own image of a random cycle.",
    here=f"One worker's peers of {topology.SEGMENTS} segments in both directions, including the calls from Python.",
    plan=plan,
    why="The time does not grow with the number of workers, except for a step between eight and a thousand.",
)
