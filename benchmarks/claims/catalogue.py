"""All claims, in the order of the page: each is `CLAIM` of a module of its own."""

from __future__ import annotations

import importlib

from claims.claim import Claim, Paper

_MODULES = {
    "gossip": ("figure_6", "figure_7", "figure_8", "figure_9", "table_1"),
    "layered": ("figure_2", "figure_4", "figure_6", "figure_7"),
    "caps": (*("figure_2", "figure_7a", "figure_7b", "figure_8a", "figure_8b", "figure_9", "accuracy", "detectors"),),
    "local_sgd": (
        *("figure_2", "figure_3", "table_1", "figure_4", "workers", "figure_5", "figure_6", "table_2"),
        *("figure_7", "figure_8", "figure_9", "figure_10"),
    ),
    "scheduled_pull": ("figure_2", "table_2", "table_3", "figures_4_to_6", "figures_7_to_9", "collisions"),
    "ours": ("peers", "shards", "latency", "copies", "scale"),
}

CLAIMS: list[Claim] = [
    importlib.import_module(f"claims.{folder}.{name}").CLAIM for folder, names in _MODULES.items() for name in names
]

PAPERS: dict[str, Paper] = {claim.paper.name: claim.paper for claim in CLAIMS}
