"""Figures 4 and 5: throughput of Layered and AllReduce, with real loading and real computing."""

from __future__ import annotations

import statistics
from typing import Any

from claims.claim import Claim, Found, Plan, Run
from claims.evidence import above, alike, elsewhere
from claims.layered.paper import PAPER
from claims.layered.throughput_worker import ALGORITHMS
from cluster.jobs import run_on_hosts
from sordino.errors import SordinoError
from sordino.report import Results

ON_A_HOST, HOSTS, MBPS, JOBS, ROUNDS = 2, (1, 2, 4), 500.0, 4, 20
_MARGIN = 0.1


def job(by: str, hosts: int, on_a_host: int, mbps: float, rounds: int, number: int) -> Results:
    """Train by one algorithm on hosts of their own; `number` tells jobs that are alike apart.

    Raises:
        SordinoError: it failed, or ranks' parameters differ.
    """
    words = ["--by", by, "--rounds", str(rounds)]
    found = run_on_hosts(hosts, on_a_host, mbps, "claims.layered.throughput_worker", words)
    if not found["right"]:
        raise SordinoError(f"job {number}: {by} leaves ranks with different parameters")
    return {"images": found["images"], "loading": found["loading"]}


def plan(quick: bool) -> Plan:
    """Both algorithms, in turn, each alone in its job."""
    hosts, mbps, jobs, rounds = ((1, 2), 1000.0, 1, 3) if quick else (HOSTS, MBPS, JOBS, ROUNDS)
    common = {"on_a_host": ON_A_HOST, "mbps": mbps, "rounds": rounds}
    keys = [(count, number, name) for count in hosts for number in range(jobs) for name in ALGORITHMS]
    work = "claims.layered.figure_4:job"
    found = yield [
        Run(work, {"by": name, "hosts": count, "number": number, **common}, count, alone=True)
        for count, number, name in keys
    ]
    images = {key: one["images"] for key, one in zip(keys, found, strict=True)}
    ratios = {
        count: [images[count, k, "layered"] / images[count, k, "allreduce"] for k in range(jobs)] for count in hosts
    }
    several = [count for count in hosts if count > 1]
    evidence = [
        above(f"{count} hosts, {count * ON_A_HOST} workers: Layered's throughput over AllReduce's", ratios[count], 1.0)
        for count in reversed(several)
    ]
    evidence.append(
        alike(
            f"one host: Layered's throughput over AllReduce's - 1, within {_MARGIN:g}",
            [one - 1 for one in ratios[1]],
            _MARGIN,
        )
    )
    evidence.append(
        elsewhere(
            "256 workers: Layered's throughput over AllReduce's",
            93.1 / 63.8,
            "64 nodes of 4 GPUs, with images on their own disks; Figure 6 says what the cost model expects",
        )
    )
    means = {
        name: [statistics.fmean(images[count, k, name] for k in range(jobs)) for count in hosts] for name in ALGORITHMS
    }
    loading = statistics.fmean(one["loading"] for one in found)
    return Found(evidence, {"workers": [count * ON_A_HOST for count in hosts], "images": means, "loading": loading})


def draw(shapes: Results, figure: Any) -> None:
    """Images a second, and their ratio, against workers."""
    figure.set_size_inches(9, 3.6)
    left, right = figure.subplots(1, 2)
    for name, values in shapes["images"].items():
        left.plot(shapes["workers"], values, marker="o", label=name)
    left.set(xlabel="workers", ylabel="images a second", ylim=(0, None))
    left.legend(frameon=False)
    both = zip(shapes["images"]["layered"], shapes["images"]["allreduce"], strict=True)
    right.plot(shapes["workers"], [one / other for one, other in both], marker="o", color="#3d5a80")
    right.axhline(1.0, color="#888888", linestyle="--")
    right.set(xlabel="workers", ylabel="Layered over AllReduce")


CLAIM = Claim(
    name="layered-figure-4",
    paper=PAPER,
    place="Figures 4 and 5",
    says="Layered's throughput grows linearly with the workers and is above AllReduce's from 16 workers on, at 256 "
    "by half; on one or two nodes it is a little below.",
    setting="ResNet-50 on ImageNet, up to 64 nodes of 4 GK210, InfiniBand EDR, images on SAS disks.",
    here=f"{HOSTS[0]} to {HOSTS[-1]} emulated hosts of {ON_A_HOST} workers with links of {MBPS:g} Mbps, on two cores: "
    "every worker reads compressed images of 224 x 224 from disk, decodes them and trains three linear layers (5.9 "
    f"MB) on them. AllReduce overlaps with backward. Each algorithm is alone in its job; {JOBS} jobs of each, in "
    "turn. It needs root.",
    plan=plan,
    why="",
    draw=draw,
)
