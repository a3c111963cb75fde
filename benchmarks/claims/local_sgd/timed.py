"""Time of communication in a step of synchronous and of local SGD, measured by jobs on emulated hosts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from claims.claim import Found, Plan, Run
from claims.evidence import Evidence, below, within
from cluster.jobs import run_on_hosts
from sordino.errors import SordinoError
from sordino.report import Results

_WELL = 0.2  # largest relative error of a good prediction
NAMES = {"synchronous": "synchronous SGD", "allreduce": "whole models", "sharded": "shards"}


@dataclass(frozen=True)
class Communication:
    """Settings of the jobs.

    Attributes:
        set: name of the parameters, a key of `worker.SETS`.
        interval: the source's I.
        shapes: P and K of each job, with one worker per host; the first is the headline.
        mbps: rate of each host's link.
        turns: number of turns of each contestant.
        rounds: number of pairs of steps, without and with averaging, in a turn.
        budget: seconds to measure the links.
    """

    set: str
    interval: int
    shapes: Sequence[tuple[int, int]]
    mbps: float
    turns: int
    rounds: int
    budget: float

    def ask(self) -> Generator[Sequence[Run], list[Results], list[Results]]:
        """Ask for one job of each shape."""
        common: Results = {key: getattr(self, key) for key in ("set", "mbps", "turns", "rounds", "budget")}
        work = "claims.local_sgd.timed:job"
        jobs = [{"groups": groups, "members": members, **common} for groups, members in self.shapes]
        return (yield [Run(work, one, one["groups"] * one["members"], alone=True) for one in jobs])

    def totals(self, found: Results, name: str) -> list[float]:
        """Return the seconds of communication per step, turn by turn. The steps of an interval share one averaging."""
        parts = zip(found["gradients"][name], found["averaging"][name], strict=True)
        return [gradients + averaging / self.interval for gradients, averaging in parts]


def job(set: str, groups: int, members: int, mbps: float, turns: int, rounds: int, budget: float) -> Results:
    """Time all contestants in turns on hosts of one worker each, and predict the times from the measured links.

    Raises:
        SordinoError: the job failed, or an average is wrong.
    """
    words = ["--set", set, "--members", str(members), "--turns", str(turns), "--rounds", str(rounds)]
    found = run_on_hosts(groups * members, 1, mbps, "claims.local_sgd.worker", [*words, "--budget", f"{budget:g}"])
    contestants = found["contestants"]
    wrong = [name for name, one in contestants.items() if not one["right"]]
    if wrong:
        raise SordinoError(f"{', '.join(wrong)}: models are not their mean")
    return {
        "rates": found["rates"],
        "gradients": {name: one["by_turn"]["gradients"] for name, one in contestants.items()},
        "averaging": {name: one["by_turn"]["averaging"] for name, one in contestants.items()},
        "predicted": {name: one["predicted"] for name, one in contestants.items()},
    }


def judge(timed: Communication, found: Sequence[Results]) -> list[Evidence]:
    """Judge shards against whole models and synchronous SGD, then predictions against measurements."""
    evidence = []
    for (groups, members), one in zip(timed.shapes, found, strict=True):
        where = f"P = {groups}, K = {members}"
        if members == 1:
            local = _over(timed, one, "allreduce", "synchronous")
            evidence.append(below(f"{where}: communication in a step, local over synchronous SGD", local, 1.0))
            continue
        averaging = [x / y for x, y in zip(one["averaging"]["sharded"], one["averaging"]["allreduce"], strict=True)]
        synchronous, whole = (_over(timed, one, "sharded", other) for other in ("synchronous", "allreduce"))
        evidence += [
            below(f"{where}: averaging models, shards over whole models", averaging, 1.0, 1 / members),
            below(f"{where}: communication in a step, shards over synchronous SGD", synchronous, 1.0),
            below(f"{where}: communication in a step, shards over whole models", whole, 1.0),
        ]
    for (groups, members), one in zip(timed.shapes, found, strict=True):
        for name, predicted in one["predicted"].items():
            expected = predicted["gradients"] + predicted["averaging"] / timed.interval
            off = [expected / value - 1 for value in timed.totals(one, name)]
            what = f"P = {groups}, K = {members}, {NAMES[name]}: prediction over measurement - 1, within {_WELL:g}"
            evidence.append(within(what, off, _WELL))
    return evidence


def _over(timed: Communication, found: Results, one: str, other: str) -> list[float]:
    both = zip(timed.totals(found, one), timed.totals(found, other), strict=True)
    return [first / second for first, second in both]


def shapes(timed: Communication, found: Sequence[Results]) -> Results:
    """Return milliseconds per step for gradients and for models, by shape and contestant, for a picture."""
    bars: dict[str, Any] = {}
    for (groups, members), one in zip(timed.shapes, found, strict=True):
        for name in one["gradients"]:
            parts = [one["gradients"][name], [value / timed.interval for value in one["averaging"][name]]]
            bars[f"P={groups} K={members} {NAMES[name]}"] = [1e3 * sum(values) / len(values) for values in parts]
    return {"bars": bars}


def communication(full: Communication, small: Communication, quick: bool) -> Plan:
    """Carry out the jobs of a claim about communication."""
    timed = small if quick else full
    found = yield from timed.ask()
    return Found(judge(timed, found), shapes(timed, found))


def draw(found: Results, figure: Any) -> None:
    """Draw bars of the time of averaging gradients and models in a step."""
    axes = figure.subplots()
    figure.set_size_inches(8, 3.6)
    names = list(found["bars"])
    gradients, models = zip(*found["bars"].values(), strict=True)
    axes.barh(names, gradients, color="#3d5a80", label="gradients")
    axes.barh(names, models, left=gradients, color="#c8553d", label="models")
    axes.invert_yaxis()
    axes.set_xlabel("communication in a step, ms")
    axes.legend(frameon=False)
