"""Claims of Layered SGD: the cost model of the paper's cluster, and its verdict."""

from __future__ import annotations

import math

import pytest

from claims.evidence import DIRECTION, FAILS, HOLDS
from claims.layered import figure_2, figure_6, model
from sordino.algorithms import AllReduce, Layered
from sordino.bench.resnet import resnet50_shapes
from sordino.plan import Line, Rates

SOFTWARE = Rates(Line(1e-6, 1e-10), Line(1e-4, 1e-9), 1e-5, 1e-5, 1e-6)


def test_a_gain_of_less_than_half_holds_in_direction() -> None:
    verdicts = [figure_6.gain("it", ours, 10.0).verdict for ours in (6.0, 4.0, -1.0)]
    assert verdicts == [HOLDS, DIRECTION, FAILS]


def test_links_are_the_source_s_and_software_is_measured() -> None:
    rates = model.Cluster(SOFTWARE).rates
    assert rates.across is not None and rates.inside is not None
    assert (rates.across.alpha, rates.hop, rates.handling) == (1e-4, 1e-5, 1e-6)
    assert 1 / rates.across.beta == pytest.approx(12.5e9) and 1 / rates.inside.beta == pytest.approx(7.875e9)
    assert 0.3 < model.COMPUTING < 0.4 and 0.01 < model.LOADING < 0.03


def test_tensor_by_tensor_every_large_gradient_goes_round_the_ring() -> None:
    large = sum(4 * math.prod(shape) > 64 * 1024 for _, shape in resnet50_shapes())
    small = len(resnet50_shapes()) - large
    load = model.tensor_by_tensor(8)
    assert load.hops == large * 2 * 7 and load.messages == small * 3
    assert load.agreements == 161


def test_efficiency_begins_at_one_node_and_falls() -> None:
    found = model.efficiencies(model.Cluster(SOFTWARE))
    for values in found.values():
        assert values[0] == pytest.approx(100.0) and values == pytest.approx(sorted(values, reverse=True))
    assert found["AllReduce"][-1] > found["AllReduce, tensor by tensor"][-1]


def test_the_hop_that_explains_an_efficiency_gives_it() -> None:
    cluster = model.Cluster(SOFTWARE)
    hop = model.hop_that_explains(0.638, 256, cluster)
    assert cluster.tensor_by_tensor(4, hop) / cluster.tensor_by_tensor(256, hop) == pytest.approx(0.638)


def test_loading_hides_layered_s_communication_between_nodes() -> None:
    cluster = model.Cluster(SOFTWARE)
    bare, hidden = (cluster.seconds(Layered(4), 64, loading) for loading in (0.0, 1.0))
    assert hidden < bare and cluster.seconds(AllReduce(), 64, 1.0) == cluster.seconds(AllReduce(), 64)
    assert figure_2.COUNTS == model.COUNTS
