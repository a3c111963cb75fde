"""Figure 6: scaling efficiency from 4 to 256 workers, by a cost model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from claims.claim import Claim, Found, Plan
from claims.evidence import DIRECTION, HOLDS, Evidence, exact
from claims.layered.model import COUNTS, ON_A_NODE, Cluster, efficiencies, hop_that_explains, links_run
from claims.papers import LAYERED
from sordino.plan import Rates
from sordino.report import Results

SOURCE = {"AllReduce": {8: 98.7, 256: 63.8}, "Layered": {32: 100.0, 256: 93.1}}
_NEAR = 5.0  # points


def gain(what: str, ours: float, source: float) -> Evidence:
    """Judge whether a predicted gain is above 0. Below half of the source's gain, it holds in direction only."""
    found = exact(what, ours, ours > 0, source)
    return replace(found, verdict=DIRECTION) if found.verdict == HOLDS and ours < source / 2 else found


def plan(quick: bool) -> Plan:
    """Measure the costs of software, and predict everything else."""
    [software] = yield [links_run(quick)]
    cluster = Cluster(Rates.from_results(software))
    found = efficiencies(cluster)
    at = {way: dict(zip(COUNTS, values, strict=True)) for way, values in found.items()}
    ways = {
        "AllReduce": "AllReduce in buckets between nodes",
        "AllReduce, overlapped": "AllReduce in buckets that overlaps too",
        "AllReduce, tensor by tensor": "all-reduces tensor by tensor",
    }
    evidence = [
        gain(f"256 workers: Layered above {words}, points", at["Layered"][256] - at[way][256], 29.3)
        for way, words in ways.items()
    ]
    for way in ("AllReduce", "AllReduce, tensor by tensor", "Layered"):
        for workers, source in SOURCE[way.partition(",")[0]].items():
            value = at[way][workers]
            what = f"{way}, {workers} workers, percent of one node's efficiency; within {_NEAR:g}"
            evidence.append(exact(what, value, abs(value - source) <= _NEAR, source))
    few, many = (1e6 * hop_that_explains(SOURCE["AllReduce"][n] / 100, n, cluster) for n in (8, 256))
    what = "hop with which all-reduces tensor by tensor match the source: 256 workers over 8; within 2 times"
    note = f"{many:.3g} µs at 256 workers and {few:.3g} µs at 8; measured here: {1e6 * cluster.rates.hop:.3g} µs"
    evidence.append(exact(what, many / few, 0.5 <= many / few <= 2, note=note))
    return Found(evidence, {"counts": list(COUNTS), "efficiency": found})


def draw(shapes: Results, figure: Any) -> None:
    """Draw efficiency against the number of workers, and the source's four values."""
    axes = figure.subplots()
    for way, values in shapes["efficiency"].items():
        axes.plot(shapes["counts"], values, marker="o", label=way)
    for way, points in SOURCE.items():
        axes.plot(list(points), list(points.values()), "x", markersize=9, label=f"{way}, the source")
    axes.set_xscale("log", base=2)
    axes.set_xticks(shapes["counts"], [str(count) for count in shapes["counts"]])
    axes.set(xlabel=f"workers, {ON_A_NODE} on a node", ylabel="efficiency, % of one node's", ylim=(0, 105))
    axes.legend(frameon=False, fontsize=7)


CLAIM = Claim(
    name="layered-figure-6",
    paper=LAYERED,
    place="Figure 6",
    says="AllReduce's scaling efficiency is 98.7 % at 8 workers and 63.8 % at 256. Layered's is 100 % up to 32 and "
    "93.1 % at 256.",
    setting="ResNet-50 on ImageNet, 64 images per worker, 4 GK210 per node, InfiniBand EDR, SAS disks, OpenMPI 3.0.",
    here="Predicted by `sordino.plan.cost_of` for the source's hardware at its nominal speed. GPUs run at their peak, "
    "which makes the share of communication as large as possible. The time of software per message, tensor and hop is "
    "measured between emulated hosts. AllReduce is predicted as Sordino does it (in buckets, node by node), and tensor "
    "by tensor over a ring of all workers. It needs root.",
    plan=plan,
    why="The source shows a gain over its own AllReduce, which has 63.8 % at 256 workers. Two ways to all-reduce the "
    "same gradients over the same links bound that value. In buckets and node by node, as Sordino does it, 95 % are "
    "predicted. Tensor by tensor over one ring of all workers it is 40 % with 26 µs per hop, as measured here, and "
    "63.8 % with 7 µs per hop. So the source's AllReduce behaves like one of tensors on a faster network than ours, "
    "and Layered's 93.1 % (88 here) is far above that. Layered is not above an all-reduce in buckets, and even less "
    "above one that overlaps with backward: the part that Layered hides is short then, and its two transfers within "
    "the node are not hidden. Over links at their nominal rate the claim holds only against a slow all-reduce. No "
    "single hop explains both of the source's values for AllReduce: 98.7 % at 8 workers is more than the bytes alone "
    "allow at the nominal rate of its links.",
    draw=draw,
)
