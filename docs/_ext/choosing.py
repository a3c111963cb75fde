"""Costs of every algorithm on some clusters, by the cost model of `sordino plan`: the tables of docs/choosing.md.

The clusters are assumptions, which the tables state; `sordino plan` measures a real one and applies the same functions.
"""

from __future__ import annotations

from sordino.algorithms import class_of
from sordino.bench.resnet import resnet50_shapes
from sordino.plan.cluster import Cluster
from sordino.plan.predictions import Job, predict, recommend
from sordino.report.tables import format_seconds, table

INTERVAL = 8
"""Steps of local SGD between two averagings, as in `sordino plan`."""
JOB = Job(resnet50_shapes(), compute=0.1, samples=1_281_167, batch=32)
MODEL = ([name for name, _ in JOB.shapes], JOB.bytes)
_BEST = 6  # rows per cluster, without AllReduce


CLUSTERS = {
    "One machine": Cluster(1, 4),
    "A fast network": Cluster(8, 4, 100.0, 5e-6),
    "Ethernet": Cluster(8, 4, 10.0, 30e-6),
    "One rank per machine, Ethernet": Cluster(8, 1, 10.0, 30e-6),
    "Over the internet": Cluster(4, 1, 0.5, 20e-3),
}


def markdown() -> str:
    """Return a table for each cluster, with the recommendation of `sordino plan`."""
    blocks = []
    for name, cluster in CLUSTERS.items():
        found = predict(JOB, cluster.places, cluster.rates, INTERVAL)
        base = next(one for one in found if one.algorithm == class_of("allreduce")())
        shown = [one for place, one in enumerate(found) if place < _BEST or one is base]
        rows = [
            [
                f"`{one.name}`",
                format_seconds(one.communication),
                format_seconds(one.exposed),
                f"{base.step / one.step:.2f}",
                str(one.algorithm.models(len(cluster.places))),
            ]
            for one in shown
        ]
        heads = ["Algorithm", "communication per step", "not hidden", "speed, all-reduce = 1", "different models"]
        blocks += [
            f"**{name}**: {cluster.described}.",
            table(heads, rows),
            f"Recommendation of `sordino plan`: {recommend(found, len(cluster.places), None)}",
        ]
    return "\n\n".join(blocks)
