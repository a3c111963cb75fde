"""All claims in the order of the pages. Each is a constant of a module in the folder of its paper."""

from __future__ import annotations

import importlib

from claims.claim import Claim, Paper

_PLACES = {
    "gossip": "accuracies:FIGURE_6 accuracies:FIGURE_7 figure_8 figure_9 accuracies:TABLE_1",
    "layered": "figure_2 figure_4 figure_6 figure_7",
    "caps": "shares:FIGURE_2 shares:FIGURE_7A accuracies:FIGURE_7B figure_8a figure_8b figure_9 accuracies:ACCURACY "
    "accuracies:DETECTORS",
    "local_sgd": "figure_2 accuracies:FIGURE_3 accuracies:TABLE_1 accuracies:FIGURE_4 workers times:FIGURE_5 "
    "times:FIGURE_6 accuracies:TABLE_2 accuracies:FIGURE_7 accuracies:FIGURE_8 times:FIGURE_9 times:FIGURE_10",
    "scheduled_pull": "figure_2 accuracies:TABLE_2 accuracies:TABLE_3 accuracies:FIGURES_4_TO_6 "
    "accuracies:FIGURES_7_TO_9 collisions",
    "ours": "peers shards latency copies scale",
}
"""Claims of each folder: "module" is the constant CLAIM of a module, "module:NAME" its constant NAME_CLAIM."""


def _claim(folder: str, place: str) -> Claim:
    module, _, name = place.partition(":")
    claim: Claim = getattr(importlib.import_module(f"claims.{folder}.{module}"), f"{name}_CLAIM" if name else "CLAIM")
    return claim


CLAIMS: list[Claim] = [_claim(folder, place) for folder, places in _PLACES.items() for place in places.split()]

PAPERS: dict[str, Paper] = {claim.paper.name: claim.paper for claim in CLAIMS}
