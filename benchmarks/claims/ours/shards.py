"""Bytes between nodes of sharded local SGD: a member of a group of K sends exactly 1/K of the model."""

from __future__ import annotations

import torch

import sordino.torch as hvd
from claims.claim import Claim, Found, Plan, Run
from claims.evidence import exact
from claims.papers import SORDINO
from sordino import sim
from sordino.algorithms import LocalSGD
from sordino.report import Results

GROUPS, SIZES, LENGTH, INTERVAL = 4, (2, 4, 8), 1 << 18, 4


def sent(groups: int, members: int) -> Results:
    """Count the bytes that every rank sends to other nodes per averaging. A group is a node."""
    counts = sim.run(groups * members, _steps, groups, members, ranks_per_node=members)
    return {"bytes": counts, "model": 4 * LENGTH}


def _steps(groups: int, members: int) -> float:
    weight = torch.nn.Parameter(torch.zeros(LENGTH))
    algorithm = LocalSGD(INTERVAL, group_size=members)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], algorithm=algorithm)
    before = hvd.stats()["bytes_sent_across_nodes"]
    for _ in range(2 * INTERVAL):
        optimizer.zero_grad()
        (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
    optimizer.flush()
    return float(hvd.stats()["bytes_sent_across_nodes"] - before) / 2


def plan(quick: bool) -> Plan:
    """Count with groups of every size. In an all-reduce among P ranks each rank sends 2 (P-1)/P of the bytes."""
    found = yield [Run("claims.ours.shards:sent", {"groups": GROUPS, "members": members}) for members in SIZES]
    evidence = []
    for members, one in zip(SIZES, found, strict=True):
        wanted = 2 * (GROUPS - 1) / GROUPS * one["model"] / members
        most = max(abs(count - wanted) for count in one["bytes"])
        what = f"K = {members}: bytes that a rank sends to other nodes, over 2 (P-1)/P of the model's"
        evidence.append(exact(what, sum(one["bytes"]) / len(one["bytes"]) / (wanted * members), most == 0, 1 / members))
    return Found([evidence[-1], *evidence[:-1]])


CLAIM = Claim(
    name="sordino-shards",
    paper=SORDINO,
    place="Exactly 1/K of the bytes",
    says="With groups of K, one per node, a rank sends exactly 1/K of the bytes of the model's all-reduce to other "
    "nodes.",
    setting="Sharded local SGD: all-to-all, averaging of a shard, all-gather.",
    here=f"{GROUPS} groups of 2, 4 and 8 ranks (threads, divided into nodes); the core counts the bytes.",
    plan=plan,
    why="The core counts the bytes that cross nodes, message by message. P is the number of groups, 4. The count is "
    "the same on every rank, to the byte.",
)
