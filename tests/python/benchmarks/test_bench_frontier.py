"""The benchmark of loss against bytes: the search for a learning rate, and the rows of its table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import frontier
from timings import frontier as table

RATES = (1.0, 2.0, 4.0, 8.0)


@pytest.mark.parametrize(
    ("losses", "best", "tried"),
    [
        ((4.0, 3.0, 1.0, 2.0), 4.0, {2.0, 4.0, 8.0}),
        ((1.0, 2.0, 3.0, 4.0), 1.0, {1.0, 2.0, 4.0}),
        ((4.0, 3.0, 2.0, 1.0), 8.0, {2.0, 4.0, 8.0}),
        ((2.0, 1.0, math.nan, math.nan), 2.0, {1.0, 2.0, 4.0}),
    ],
)
def test_the_search_for_a_rate_goes_on_while_the_loss_falls(
    losses: tuple[float, ...], best: float, tried: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(entry: frontier.Entry, model: object, rate: float, seed: int, folder: Path) -> dict[str, Any]:
        assert seed == frontier.SEEDS[0]
        return {"loss": losses[RATES.index(rate)]}

    monkeypatch.setattr(frontier, "run", run)
    found, values = frontier.best_rate(frontier.BASELINE, {}, RATES, Path())
    assert found == best
    assert set(values) == {str(rate) for rate in tried}


def test_a_row_is_on_the_frontier_if_none_has_both_fewer_bytes_and_a_smaller_loss() -> None:
    def row(name: str, sent_bytes: int, loss: float) -> dict[str, Any]:
        return {"name": name, "sent_bytes": sent_bytes, "loss": loss}

    rows = [row("all", 100, 1.0), row("less", 10, 1.2), row("worse", 20, 1.3), row("alone", 0, 2.0)]
    assert [one["name"] for one in table.on_frontier(rows)] == ["less", "all"]
