"""All claims, in the order of the page."""

from __future__ import annotations

from claims.claim import Claim
from claims.gossip import figure_6, figure_7, figure_8, figure_9, table_1
from claims.ours import copies, latency, peers, shards

CLAIMS: list[Claim] = [
    *(figure_6.CLAIM, figure_7.CLAIM, figure_8.CLAIM, figure_9.CLAIM, table_1.CLAIM),
    *(peers.CLAIM, shards.CLAIM, latency.CLAIM, copies.CLAIM),
]

PAPERS = {claim.paper.name: claim.paper for claim in CLAIMS}
