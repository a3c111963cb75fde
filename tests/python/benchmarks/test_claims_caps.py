"""The claims of CaPS-Learning: verdicts from measurements, and small versions of their work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from claims.caps import accuracies, detection, figure_8a, figure_8b, figure_9, shares
from claims.caps.networks import Dropout, layers_of, make_network
from claims.caps.training import QUICK, Training, train
from claims.claim import Claim, Found, Run, play
from claims.evidence import DIRECTION, FAILS, HOLDS, Evidence
from sordino import sim

CONVOLUTIONAL = layers_of(make_network("convolutional", 8, 1))
RESIDUAL = layers_of(make_network("residual", 8, 1))


def played(claim: Claim, answer: Any) -> Found:
    """Return what a claim finds if the result of each run is `answer` of its settings."""

    def find(runs: Sequence[Run]) -> list[dict[str, Any]]:
        return [answer(run.settings) for run in runs]

    return play(claim, False, find)


def verdicts(evidence: Sequence[Evidence], word: str) -> list[str]:
    return [one.verdict for one in evidence if word in one.what]


def rising(settings: dict[str, Any], layers: Sequence[str], ends: Sequence[float]) -> dict[str, Any]:
    """Return unchanged shares that rise from 1 % to each layer's end, with small differences between seeds."""
    return {
        "unchanged": {
            name: [1.0] * (settings["epochs"] - 1) + [end + 0.01 * settings["seed"]]
            for name, end in zip(layers, ends, strict=True)
        }
    }


# --- Verdicts from measurements ---------------------------------------------------------------------------------------


def test_figure_2_tells_whether_shares_rise_and_where_more() -> None:
    found = played(shares.FIGURE_2_CLAIM, lambda settings: rising(settings, CONVOLUTIONAL, (2, 2, 30, 40)))
    assert verdicts(found.evidence, "last epoch - first") == [HOLDS] * 9 == verdicts(found.evidence, "linear layers -")
    found = played(shares.FIGURE_2_CLAIM, lambda settings: rising(settings, CONVOLUTIONAL, (0.5, 0.5, 0.1, 0.1)))
    assert verdicts(found.evidence, "last epoch - first") == [FAILS] * 9 == verdicts(found.evidence, "linear layers -")


def test_figure_7a_wants_the_last_layer_still_and_the_middle_moving() -> None:
    middle = len(RESIDUAL) - 2

    def verdicts_at(first: float, between: float, last: float) -> list[str]:
        ends = (first, *[between] * middle, last)
        found = played(shares.FIGURE_7A_CLAIM, lambda settings: rising(settings, RESIDUAL, ends))
        return [one.verdict for one in found.evidence[:4]]

    assert verdicts_at(11, 0.5, 98) == [HOLDS] * 4
    assert verdicts_at(2, 1.5, 30) == [DIRECTION, FAILS, FAILS, DIRECTION]


def test_figure_7b_shows_every_seeds_end_and_bytes() -> None:
    def answer(settings: dict[str, Any]) -> dict[str, Any]:
        seed = settings["seed"]
        end = 20.0 + seed if settings["metric"] == "last" else 5.0
        return {"threshold": [10.0, end], "sent_in_all": 100.0 if seed == 3 else 30.0}

    one, two, three = played(accuracies.FIGURE_7B_CLAIM, answer).evidence
    assert (one.verdict, two.verdict, three.verdict) == (HOLDS, FAILS, FAILS)
    assert "22 % (30 % sent); 23 % (100 % sent); 24 % (30 % sent)" in one.note


def test_steps_are_compared_round_by_round() -> None:
    ms = {"AllReduce": [100.0, 200.0], "averaging": [104.0, 208.0], "naive": [105.0, 210.0], "random": [103.0, 206.0]}
    ms |= {"history": [102.0, 204.0], "movement": [110.0, 220.0]}
    found = played(figure_8a.CLAIM, lambda _: {"ms": ms})
    assert found.evidence[0].ours == pytest.approx(5.0) and found.evidence[0].verdict == HOLDS
    assert [one.verdict for one in found.evidence[1:5]] == [DIRECTION, HOLDS, FAILS, FAILS]


def test_a_detector_that_counts_wrongly_is_found_out() -> None:
    ms = {name: [1.0, 1.1] for name in ("count", "naive", "random", "history", "movement", "add")}
    ms |= {f"source's {name}": [2.0, 2.1] for name in ("naive", "random", "history")}
    for unchanged, verdict in ((0.5, HOLDS), (0.4, FAILS)):
        found = played(figure_8b.CLAIM, lambda _, unchanged=unchanged: {"ms": ms, "unchanged": unchanged})
        assert verdicts(found.evidence, "half of the elements have changed") == [verdict]


def test_communication_is_compared_with_the_first_epochs() -> None:
    def answer(settings: dict[str, Any]) -> dict[str, Any]:
        ends = {"AllReduce": 10.0, "unskipped": 10.0, "naive": 9.2, "random": 9.3, "history": 11.0}
        epochs = {n: [{"ms": 10.0, "bytes": 3e5}, {"ms": end, "bytes": 2e5}] for n, end in ends.items()}
        return {"epochs": epochs, "equal": settings["seed"] != 2}

    found = played(figure_9.CLAIM, answer)
    assert [one.verdict for one in found.evidence[:5]] == [HOLDS, HOLDS, FAILS, HOLDS, HOLDS]
    assert found.evidence[0].ours == pytest.approx(8.0) and found.evidence[-1].verdict == FAILS
    assert "300 to 200" in found.evidence[0].note


def test_accuracy_is_compared_after_as_many_steps_and_as_many_bytes() -> None:
    asked = set()

    def answer(settings: dict[str, Any]) -> dict[str, Any]:
        if settings["algorithm"] == "allreduce":
            asked.add(settings["epochs"])
            return {"test": 85.0 if settings["epochs"] == accuracies.ACCURACY_EPOCHS else 80.0}
        digits = settings["options"].get("digits")
        return {"test": 70.0 if digits == 3 else 85.1, "sent_in_all": 10.0 + settings["seed"] if digits else 30.0}

    evidence = played(accuracies.ACCURACY_CLAIM, answer).evidence
    assert [one.verdict for one in evidence] == [HOLDS, HOLDS, FAILS, HOLDS, HOLDS, HOLDS]
    assert asked == {accuracies.ACCURACY_EPOCHS, round(0.3 * accuracies.ACCURACY_EPOCHS)}
    assert evidence[-1].ours == pytest.approx(5.1)
    assert "11.0, 12.0, 13.0" in evidence[1].note


def test_values_between_known_ones_lie_on_a_line() -> None:
    known = [(100.0, 0.0), (20.0, 8.0), (60.0, 4.0)]
    assert accuracies.between(40.0, known) == 6.0 and accuracies.between(100.0, known) == 0.0
    assert accuracies.between(10.0, known) is None and accuracies.between(60.0, [(60.0, 1.0), (60.0, 2.0)]) == 1.0


def test_detectors_are_compared_at_as_many_bytes() -> None:
    def answer(settings: dict[str, Any]) -> dict[str, Any]:
        name, threshold = settings["options"]["detector"], settings["options"]["threshold"]
        if name == "movement":
            sent = min(20.0 + 0.8 * threshold, 100.0)
            return {"sent_in_all": sent, "distance": [0.01 * (100.0 - sent) + 0.1], "test": 85.0}
        sent = 99.0 if name == "history" else 50.0
        return {"sent_in_all": sent, "distance": [0.02 * (100.0 - sent) + 0.2], "test": 85.0}

    found = played(accuracies.DETECTORS_CLAIM, answer)
    assert [one.verdict for one in found.evidence] == [FAILS, HOLDS, *[HOLDS] * 12]
    assert verdicts(found.evidence, "distance between workers") == [HOLDS] * 3
    assert found.evidence[2].ours == pytest.approx(-50.0)


# --- The work ---------------------------------------------------------------------------------------------------------


def test_dropout_is_the_seeds() -> None:
    one, other = Dropout(), Dropout()
    for module in (one, other):
        module.begin(3)
    values = torch.ones(1000)
    first = one(values)
    assert torch.equal(first, other(values)) and not torch.equal(first, one(values))
    assert set(first.tolist()) == {0.0, 2.0} and 400 < first.count_nonzero() < 600
    one.eval()
    assert torch.equal(one(values), values)


@pytest.mark.parametrize(("network", "kind"), [("convolutional", "momentum"), ("residual", "adam")])
def test_a_training_tells_what_each_epoch_did(network: str, kind: str) -> None:
    options = {"threshold": 0.0, "scheduler": {"history_length": 2, "frequency": 1, "lower": 0.0}}
    task = QUICK | {"network": network, "optimizer": kind, "decays": True, "metric": "validation"}
    training = Training(1, 3, options=options, **task)
    found = train(**training.run.settings)
    assert found["equal"] and 0 < found["test"] <= 100 and len(found["loss"]) == 3
    assert list(found["unchanged"]) == (CONVOLUTIONAL if network == "convolutional" else RESIDUAL)
    assert len(found["sent"]) == len(found["threshold"]) == len(found["distance"]) == 3
    assert found["sent"][0] == pytest.approx(0.0)  # an epoch has four steps, and a probe comes at the fifth
    assert all(0 <= share <= 100 for one in found["unchanged"].values() for share in one)


def test_without_skipping_a_training_is_all_reduces() -> None:
    """Equal up to rounding, as one averages gradients and the other averages parameters."""
    unskipped, plain = (
        train(**Training(1, 2, algorithm=name, options=options, **QUICK).run.settings)
        for name, options in (("caps", {"threshold": 101.0}), ("allreduce", {}))
    )
    assert plain["equal"] and unskipped["sent_in_all"] == 100.0
    assert unskipped["loss"] == pytest.approx(plain["loss"], rel=1e-2)


def test_detection_counts_right_and_times_everything() -> None:
    found = detection.measure(narrow=16, budget=0.05)
    assert found["unchanged"] == pytest.approx(0.5, abs=0.01)
    assert len({len(one) for one in found["ms"].values()}) == 1 and all(min(one) > 0 for one in found["ms"].values())


def test_the_source_s_naive_counts_as_ours() -> None:
    def count() -> list[int]:
        tensors = [torch.zeros(300), torch.zeros(7)]
        ordinary = detection.Ordinary(tensors)
        tensors[0][:100] += 1
        first = ordinary.naive()
        return first + ordinary.naive()

    assert sim.run(1, count) == [[200, 7, 300, 7]]
