"""Figure 2: the share of communication in a step of conventional SGD, by the number of workers."""

from __future__ import annotations

import math
import statistics
from typing import Any

from claims.claim import Claim, Found, Plan, Run
from claims.evidence import above, below, exact
from claims.layered.model import COMPUTING, COUNTS, Cluster, links_run
from claims.layered.share_worker import SHAPES, WAYS
from claims.papers import LAYERED
from cluster.jobs import run_on_hosts
from sordino.algorithms import AllReduce
from sordino.errors import SordinoError
from sordino.plan import Rates
from sordino.report import Results

HOSTS, MBPS, COMPUTE_MS, JOBS, ROUNDS = (2, 4, 8), 100.0, 400.0, 3, 5
_SLOW = 1.5  # largest ratio to the time of the bytes on a link; a larger one would show that cores limit the time


def job(hosts: int, mbps: float, compute_ms: float, rounds: int, number: int) -> Results:
    """Time steps on emulated hosts of one worker each. `number` distinguishes jobs with equal settings.

    Raises:
        SordinoError: the job failed, or an average is wrong.
    """
    words = ["--compute-ms", f"{compute_ms:g}", "--rounds", str(rounds)]
    found = run_on_hosts(hosts, 1, mbps, "claims.layered.share_worker", words)
    if not found["right"]:
        raise SordinoError(f"job {number}: gradients are not their mean")
    return {"seconds": found["seconds"]}


def plan(quick: bool) -> Plan:
    """Measure shares on emulated hosts, and predict them for the source's cluster."""
    hosts, mbps, compute, jobs, rounds = (
        ((2, 4), 2000.0, 20.0, 1, 2) if quick else (HOSTS, MBPS, COMPUTE_MS, JOBS, ROUNDS)
    )
    common = {"mbps": mbps, "compute_ms": compute, "rounds": rounds}
    keys = [(number, count) for number in range(jobs) for count in hosts]
    work = "claims.layered.figure_2:job"
    found = yield [Run(work, {"hosts": count, "number": number, **common}, count, alone=True) for number, count in keys]
    seconds = {(way, *key): one["seconds"][way] for key, one in zip(keys, found, strict=True) for way in WAYS}
    shares = {key: 100 * (1 - compute / 1e3 / one) for key, one in seconds.items()}
    [software] = yield [links_run(quick)]
    cluster = Cluster(Rates.from_results(software))
    predicted = {
        "tensor by tensor": [100 * (1 - COMPUTING / cluster.tensor_by_tensor(count)) for count in COUNTS],
        "in buckets": [100 * (1 - COMPUTING / cluster.seconds(AllReduce(), count)) for count in COUNTS],
    }
    evidence = []
    for way in WAYS:
        rises = [shares[way, number, hosts[-1]] - shares[way, number, hosts[0]] for number in range(jobs)]
        what = f"measured, {way}: communication's share on {hosts[-1]} hosts above that on {hosts[0]}, points"
        evidence.append(above(what, rises))
    size = 4 * sum(math.prod(shape) for _, shape in SHAPES)
    for count in hosts:
        least = 2 * (count - 1) / count * size / (mbps * 1e6 / 8)
        over = [(seconds["in buckets", k, count] - compute / 1e3) / least for k in range(jobs)]
        what = f"measured, in buckets, {count} hosts: communication over what its bytes take on a link; below {_SLOW:g}"
        evidence.append(below(what, over, _SLOW))
    for way, values in predicted.items():
        last = values[-1] - values[-3]
        what = f"predicted, {way}: the share at {COUNTS[-1]} workers above that at {COUNTS[-3]}, points; above 5"
        evidence.append(exact(what, last, last > 5))
    measured = {way: [statistics.fmean(shares[way, k, count] for k in range(jobs)) for count in hosts] for way in WAYS}
    return Found(evidence, {"hosts": list(hosts), "measured": measured, "counts": list(COUNTS), "predicted": predicted})


def draw(shapes: Results, figure: Any) -> None:
    """Draw measured and predicted shares against the number of workers."""
    figure.set_size_inches(9, 3.6)
    left, right = figure.subplots(1, 2)
    for axes, counts, key in ((left, "hosts", "measured"), (right, "counts", "predicted")):
        for way, values in shapes[key].items():
            axes.plot(shapes[counts], values, marker="o", label=way)
        axes.set_xscale("log", base=2)
        axes.set_xticks(shapes[counts], [str(count) for count in shapes[counts]])
        axes.set(xlabel="workers", ylabel="communication, % of a step", title=key, ylim=(0, 100))
    left.legend(frameon=False)


CLAIM = Claim(
    name="layered-figure-2",
    paper=LAYERED,
    place="Figure 2",
    says="The share of AllReduce in the time of conventional SGD rises with the number of workers, linearly from 64 "
    "on.",
    setting="ResNet-50 on ImageNet, 64 images per worker, up to 256 GPUs on 64 nodes.",
    here=f"Measured on {HOSTS[0]} to {HOSTS[-1]} emulated hosts of one worker each, with links of {MBPS:g} Mbps, "
    f"gradients of ResNet-50 with a quarter of the channels, a sleep of {COMPUTE_MS:g} ms as computation, and no "
    f"overlap; {JOBS} jobs. Predicted for the source's cluster as in Figure 6. It needs root.",
    plan=plan,
    why="The share rises with the number of workers, as the source says, because a ring sends 2 (P-1)/P of the model: "
    "from 2 hosts to 8 it grows by 13 points, at 1.1 times the time of the bytes on a link. Beyond that the kind of "
    "all-reduce decides. For the source's cluster the cost model of Figure 6 predicts that the share rises by 25 "
    "points from 64 to 256 workers if tensors are reduced one by one around all workers, and almost not at all if they "
    "go in buckets from node to node. So the linear rise comes from hops, which buckets save.",
    draw=draw,
)
