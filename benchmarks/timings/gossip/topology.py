"""Time of one worker to find its peers: a random cycle by arithmetic, against Algorithm 2 of Crossover-SGD.

  python benchmarks/gossip.py topology

Both give destinations for 16 segments, about ResNet-50's number of blocks; ours also gives the sources. Ours is called
from Python, one call per segment and direction, and the calls are timed too. Algorithm 2 is as written, in numpy: every
worker draws for all workers in turn, from a roulette without the taken workers. Each row of roulettes is made when it
is used, because a table for 10^5 workers would take 80 GB. A step that takes longer than --limit is stopped and
reported as such; nothing is extrapolated.

A draw of Algorithm 2 reaches a dead end when the last worker finds only itself. Dead ends are counted, and their
probability is computed by recursion. Finally, the copies that the busiest worker sends are counted, for Crossover and
for COMBO, which does not balance the load.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import numpy as np

from sordino._core import RandomCycle, RandomPull, Topology
from sordino.bench import command_line
from sordino.report import Results, machines, records, verdicts
from sordino.report.tables import format_seconds
from sordino.timing import Participants, Watch, race, summarize
from timings.gossip.report import REPORTS

SEGMENTS = 16
STEP_MS = 100.0
SIZES = "8,32,128,512,2048,10000,100000"
LOAD_SIZES = (8, 64, 512)
_LARGEST_RECURSION = 10_000


class TooSlow(Exception):
    """A draw took longer than the limit."""


def algorithm_2(size: int, generator: np.random.Generator, deadline: float) -> list[int]:
    """Return the destinations of all workers as the source draws them, with equal weights; empty at a dead end.

    Raises:
        TooSlow: the deadline, by time.perf_counter, has passed.
    """
    destinations = np.empty(size, dtype=np.int64)
    for worker in range(size):
        if time.perf_counter() > deadline:
            raise TooSlow
        roulette = np.full(size, 1 / max(size - 1, 1))
        roulette[worker] = 0
        roulette[destinations[:worker]] = 0
        total = roulette.sum()
        if total == 0:
            return []
        roulette /= total
        destinations[worker] = generator.choice(size, p=roulette)
    return [int(one) for one in destinations]


def dead_end_probability(size: int) -> float:
    """Return the probability of a dead end of `algorithm_2`: that no earlier worker draws the last worker.

    Workers that have not drawn yet are interchangeable. So the state is the number of them, without the last one, that
    no worker has drawn yet.
    """
    chance = np.zeros(size)  # by that number, if the last worker is not taken
    chance[size - 1] = 1.0
    free = np.arange(size, dtype=np.float64)
    for worker in range(size - 1):
        left = size - worker
        itself_free = chance * free / (left - 1)
        itself_taken = chance - itself_free
        after = np.zeros(size)
        # A worker that is free has one choice less, because it cannot draw itself. After its draw it no longer counts.
        after[:-2] += (itself_free * (free - 1) / (left - 1))[2:]
        after[:-1] += (itself_free * (left - 1 - free) / (left - 1))[1:]
        after[:-1] += (itself_taken * free / left)[1:]
        after += itself_taken * (left - 1 - free) / left
        chance = after
    return float(chance.sum())


def measure_ours(size: int, budget: float) -> Results:
    """Return the seconds per step that one worker needs, including the calls from Python."""
    topology, rounds = RandomCycle(size, seed=1), count()

    def run() -> None:
        turn = next(rounds)
        for segment in range(SEGMENTS):
            topology.row(turn, segment, turn % size)
            topology.destinations(turn, segment, turn % size)

    return race({"ours": run}, Participants(), budget)["ours"].summary()


def measure_source(size: int, budget: float, limit: float) -> Results:
    """Return the seconds per step of Algorithm 2, and its dead ends; or {"over": limit} if a step exceeds the limit."""
    generator, dead_ends = np.random.default_rng(size), 0
    steps: list[float] = []
    end = time.perf_counter() + budget
    while not steps or time.perf_counter() < end:
        begin = time.perf_counter()
        try:
            dead_ends += sum(not algorithm_2(size, generator, begin + limit) for _ in range(SEGMENTS))
        except TooSlow:
            return {"over": limit}
        steps.append(time.perf_counter() - begin)
    return summarize(np.array(steps)) | {"dead_ends": dead_ends, "draws": SEGMENTS * len(steps)}


def copies(topology: Topology, rounds: int) -> Results:
    """Return the copies that a worker sends per round: the mean, and the busiest worker's mean and maximum over rounds.

    Copies are counted for one segment, and for all segments together in copies of the model.
    """
    counts = np.zeros((rounds, SEGMENTS, topology.size))
    for turn in range(rounds):
        for segment in range(SEGMENTS):
            for sources in topology.all_sources(turn, segment):
                np.add.at(counts[turn, segment], sources, 1)
    models = counts.mean(axis=1)
    return {
        "mean": float(counts.mean()),
        "segment_busiest": float(counts.max(axis=2).mean()),
        "segment_worst": float(counts.max()),
        "model_busiest": float(models.max(axis=1).mean()),
        "model_worst": float(models.max()),
    }


def targets(results: Results) -> list[Results]:
    """Return the targets: finding peers must be negligible in a step at any number of workers."""
    rows = results["rows"]
    entries = []
    for row in (rows[0], rows[-1]):
        what = f"{row['workers']} workers: percent of a step of {STEP_MS:g} ms"
        entries.append(verdicts.target(what, 1e5 * row["ours"]["median"] / STEP_MS, 0.1, at_least=False))
    crossover = [one for one in results["load"] if one["algorithm"] == "crossover"]
    worst = max(one["segment_worst"] for one in crossover)
    entries.append(verdicts.target("Crossover: copies of a segment that the busiest worker sends", worst, 1.0, False))
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark in this process."""
    options = command_line.parser("gossip topology", __doc__, 10.0, "size and way")
    options.add_argument("--sizes", default=SIZES, metavar="LIST", help=f"numbers of workers (default {SIZES})")
    options.add_argument("--limit", type=float, default=60.0, metavar="S", help="longest measured step (default 60)")
    chosen = options.parse_args(argv)
    budget, limit = (0.3, 1.0) if chosen.quick else (chosen.budget, chosen.limit)
    found_machine, watch = machines.machine(None), Watch(Participants())
    rows = []
    for size in [int(text) for text in chosen.sizes.split(",")]:
        row: Results = {"workers": size, "ours": measure_ours(size, min(budget, 2.0))}
        row["source"] = measure_source(size, budget, limit)
        if size <= _LARGEST_RECURSION:
            row["dead_end_probability"] = dead_end_probability(size)
        rows.append(row)
        records.log(f"{size} workers: ours {format_seconds(row['ours']['median'])}, source's {row['source']}")
    load = []
    for size in LOAD_SIZES:
        for name, topology in (("crossover", RandomCycle(size, 1)), ("combo", RandomPull(size, 1, SEGMENTS, 1))):
            load.append({"workers": size, "algorithm": name} | copies(topology, 3 if chosen.quick else 50))
    found_machine["others"] = watch.others()
    results: Results = {
        "benchmark": "gossip_topology",
        "name": "gossip_topology",
        "machine": found_machine,
        "segments": SEGMENTS,
        "step_ms": STEP_MS,
        "rows": rows,
        "load": load,
    }
    results["targets"] = targets(results)
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 0
