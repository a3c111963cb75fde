"""A member of a group of K sends one K-th of the model to other nodes, to the byte."""

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
    """Count the bytes that every rank sends to other nodes, an averaging; a group is a node."""
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
    """Groups of every size; an all-reduce among P ranks sends 2 (P-1)/P of what it reduces, a rank."""
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
    says="With groups of K on a node each, a rank sends exactly one K-th of the model's all-reduce to other nodes.",
    setting="Sharded local SGD: all-to-all, averaging of a shard, all-gather.",
    here=f"{GROUPS} groups of 2, 4 and 8 ranks (threads, cut into nodes), counted by the core.",
    plan=plan,
    why="What crosses nodes is counted by the core, message by message. P is the number of groups, 4; the count is the "
    "same on every rank, to the byte.",
)
