"""A user's algorithm works everywhere where ours do: examples/custom_algorithm.py."""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from checks.commands import launch

import sordino.torch as hvd
from sordino import extend, plan, sim
from sordino._core import RandomCycle, Ring
from sordino.algorithms import AllReduce, registry, resolve
from sordino.algorithms.strategy import Runtime, Strategy
from sordino.algorithms.traffic import Exchange, Model, Phase, Traffic, groups_of
from sordino.cli.app import main
from sordino.errors import PeerLost, UsageError
from sordino.simulate.traffic import StepMessages as SimulatedTraffic

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

from custom_algorithm import EmaGossip, EmaStrategy  # noqa: E402

NAME = "custom_algorithm:EmaGossip"
STEPS, LR = 7, 0.1


def trained(algorithm: EmaGossip, steps: int, state: Any = None, stop: int | None = None) -> tuple[torch.Tensor, Any]:
    """Return the parameters of this rank after some steps, and a state from after step `stop` (None without it)."""
    weight = torch.nn.Parameter(torch.full((5,), float(hvd.rank()), dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=LR), [("weight", weight)], algorithm=algorithm)
    saved = None
    if state is not None:
        with torch.no_grad():
            weight.copy_(state["weight"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(steps):
        optimizer.zero_grad()
        (weight.square().sum() * (hvd.rank() + 1) / 2).backward()
        optimizer.step()
        if step + 1 == stop:
            saved = {"weight": weight.detach().clone(), "optimizer": optimizer.state_dict()}
    return weight.detach().clone(), saved


def mixed(topology: extend.Topology, round: int, values: list[float]) -> list[float]:
    """Return the value of every rank after one mixing."""
    rows = [topology.row(round, 0, rank) for rank in range(topology.size)]
    return [
        scale * (sum(values[one] for one in sources) + keeps_own * own)
        for (sources, keeps_own, scale), own in zip(rows, values, strict=True)
    ]


def imported(source: str) -> set[str]:
    """Return the modules that a source file imports."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return names | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def test_it_imports_nothing_of_sordino_but_what_is_for_it() -> None:
    found = imported((EXAMPLES / "custom_algorithm.py").read_text())
    assert {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names} == {
        "sordino.extend",
        "torch",
    }


def test_everything_in_extend_is_public_and_there() -> None:
    assert extend.__all__ == sorted(extend.__all__)
    assert all(getattr(extend, name).__doc__ for name in extend.__all__ if name != "Closure")


def test_a_gossip_algorithm_that_only_chooses_its_peers_is_short() -> None:
    """The algorithm is the one in docs/extending.md, which is run unchanged."""
    page = (ROOT / "docs" / "extending.md").read_text()
    source = page.partition("```python\n")[2].partition("```")[0]
    assert "class RingAndRandom" in source and len(source.splitlines()) <= 40
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, "docs/extending.md", "exec", flags=0, dont_inherit=True), names)
    algorithm, size = names["RingAndRandom"](interval=2, seed=3), 5

    def train() -> float:
        weight = torch.nn.Parameter(torch.tensor([float(hvd.rank())], dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=LR), [("w", weight)], algorithm=algorithm)
        for _ in range(4):
            optimizer.zero_grad()
            (weight * hvd.rank()).sum().backward()
            optimizer.step()
        return weight.item()

    weights = [float(rank) for rank in range(size)]
    for round in (0, 1):
        weights = [w - 2 * LR * rank for rank, w in enumerate(weights)]
        for topology in algorithm.rounds_of(size, 1):
            weights = mixed(topology, round, weights)
    assert sim.run(size, train) == pytest.approx(weights)


@dataclass(frozen=True)
class InPairs(extend.MixingGossip):
    """Gossip of pairs of ranks, which average their gradients."""

    @property
    def workers_in_group(self) -> int:
        return 2

    def rounds_of(self, size: int, segment_count: int) -> list[extend.Topology]:
        return [extend.Grouped(extend.Ring(size // 2), 2, False)]


def test_the_gradients_of_groups_are_counted() -> None:
    traffic = InPairs().traffic(Model(["w"], [1000.0]), [0, 0, 1, 1])
    [reduction] = traffic.phases[0].at(0)
    assert isinstance(reduction, extend.Reduction) and len(traffic.phases) == 2


def by_formula(algorithm: EmaGossip, size: int) -> list[float]:
    peers = registry.class_of("crossover")().rounds_of(size, 1)[0]  # type: ignore[attr-defined]
    weights, averages = [float(rank) for rank in range(size)], [float(rank) for rank in range(size)]
    for step in range(STEPS):
        weights = [w - LR * (rank + 1) * w for rank, w in enumerate(weights)]
        averages = [algorithm.decay * e + (1 - algorithm.decay) * w for e, w in zip(averages, weights)]
        round, rest = divmod(step + 1, algorithm.interval)
        if rest == 0:
            averages = mixed(peers, round - 1, averages)
            weights = [w + algorithm.pull * (e - w) for w, e in zip(weights, averages)]
    return weights


@pytest.mark.parametrize("size", (2, 5))
@pytest.mark.parametrize("interval", (1, 3))
def test_it_does_what_it_says(size: int, interval: int) -> None:
    algorithm = EmaGossip(interval=interval, decay=0.7, pull=0.3)
    found = sim.run(size, lambda: trained(algorithm, STEPS)[0])
    for values, wanted in zip(found, by_formula(algorithm, size), strict=True):
        torch.testing.assert_close(values, torch.full((5,), wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    algorithm = EmaGossip(interval=2)
    whole = sim.run(3, lambda: trained(algorithm, STEPS, stop=4))
    rest = sim.run(3, lambda: trained(algorithm, STEPS - 4, state=whole[hvd.rank()][1])[0])
    for (wanted, _), found in zip(whole, rest, strict=True):
        assert torch.equal(wanted, found)


def test_the_others_go_on_when_a_rank_is_lost() -> None:
    def train() -> tuple[int, bool]:
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=LR), [("weight", weight)], algorithm=NAME)
        for step in range(12):
            if step == 5 and hvd.rank() == 2 and hvd.size() == 4:
                raise PeerLost("this rank ends here")
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
        return hvd.size(), bool(weight.isfinite().all())

    found = sim.run(4, train, on_peer_lost="continue")
    assert [one for one in found if one is not None] == [(3, True)] * 3


def test_frozen_parameters_are_not_exchanged() -> None:
    def work() -> list[list[float]]:
        weight, frozen = (torch.nn.Parameter(torch.full((2,), float(hvd.rank()))) for _ in range(2))
        frozen.requires_grad_(False)
        sgd = torch.optim.SGD([weight, frozen], lr=0.0)
        optimizer = hvd.DistributedOptimizer(sgd, [("w", weight), ("f", frozen)], algorithm=EmaGossip(interval=1))
        for _ in range(3):
            weight.sum().backward()
            optimizer.step()
        return [weight.tolist(), frozen.tolist()]

    weights, frozen = zip(*sim.run(3, work))
    assert frozen == ([0.0] * 2, [1.0] * 2, [2.0] * 2) and weights[0] != [0.0] * 2


def test_a_package_registers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "ema_gossip-0.1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: ema-gossip\nVersion: 0.1\n")
    (told / "entry_points.txt").write_text(f"[sordino.algorithms]\nema-gossip = {NAME}\nbroken = no_such_module:X\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._known.cache_clear()
    try:
        assert "ema-gossip" in registry.names()
        assert resolve("ema-gossip") == EmaGossip()
        with pytest.raises(UsageError, match="no_such_module"):
            resolve("broken")
        with pytest.warns(UserWarning, match="broken is not compared: .*no_such_module"):
            compared = plan.candidates([0, 0], 4)
        assert EmaGossip() in compared and AllReduce() in compared
    finally:
        monkeypatch.undo()
        registry._known.cache_clear()
    with pytest.raises(UsageError, match="unknown algorithm 'ema-gossip'"):
        resolve("ema-gossip")
    with pytest.raises(UsageError, match="not a dataclass that derives from"):
        resolve("json:JSONDecoder")


class Noting(EmaStrategy):
    """Strategy that notes the calls around its steps."""

    def prepare(self) -> None:
        super().prepare()
        self.calls: list[str] = []

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("before")
        super().before_step(optimizer)

    def after_step(self) -> None:
        self.calls.append("after")
        super().after_step()


class NotingGossip(EmaGossip):
    """`EmaGossip`, whose strategy notes its calls."""

    def strategy(self, runtime: Runtime) -> Strategy:
        return Noting(runtime, self)


@pytest.mark.parametrize("size", (1, 3))
def test_a_scaled_step_begins_and_ends_once_taken_or_left_out(size: int) -> None:
    def train() -> list[str]:
        weight = torch.nn.Parameter(torch.ones(4))
        inner = torch.optim.SGD([weight], lr=LR)
        optimizer = hvd.DistributedOptimizer(inner, [("weight", weight)], algorithm=NotingGossip())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for factor in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert bool(weight.isfinite().all())
        return optimizer._strategy.calls  # type: ignore[attr-defined, no-any-return]

    assert sim.run(size, train) == [["before", "after"] * 3 if size > 1 else []] * size


def test_it_begins_anew_with_other_parameters() -> None:
    def train() -> torch.Tensor:
        weights = [torch.nn.Parameter(torch.full((count,), 1.0 + hvd.rank())) for count in (1, 5)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(weights[:1], lr=LR), [("0", weights[0])], algorithm=EmaGossip(pull=1.0)
        )
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": weights[1:]})
            optimizer.zero_grad()
            sum(weight.sum() for weight in weights).backward()
            optimizer.step()
        return weights[1].detach().clone()

    for found in sim.run(2, train):
        assert bool((found == found[0]).all()) and 0.5 < float(found[0]) < 2


def test_the_simulator_draws_every_phase_by_itself() -> None:
    """Two phases that come at once, with different topologies."""
    size, everybody = 6, groups_of(6, 6)
    peers = [Ring(size), RandomCycle(size, 5)]
    phases = [Phase(lambda round, sent, one=one: [Exchange(everybody, one, [8.0], round)]) for one in peers]

    class Told(EmaGossip):
        phases: Sequence[Phase] = ()

        def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
            return Traffic(self.phases)

    def sends(chosen: Sequence[Phase]) -> list[tuple[list[int], list[int]]]:
        algorithm = Told()
        object.__setattr__(algorithm, "phases", chosen)
        found = SimulatedTraffic(algorithm, size, Model(["w"], [8.0])).phases(3, None)
        return [(one.sources.tolist(), one.targets.tolist()) for one in found]

    first, second = sends(phases[:1]), sends(phases[1:])
    assert first != second and sends(phases) == first + second


def test_a_plan_knows_its_costs() -> None:
    cost = plan.cost_of(EmaGossip(interval=4), [0, 1, 2, 3], ["weight"], [1_000_000])
    assert cost.sent() == [250_000] * 4


@pytest.mark.parametrize("data", ("none", "digits"))
def test_a_simulation_runs_it(tmp_path: Path, data: str) -> None:
    told = tmp_path / "out.json"
    words = ["--algorithm", NAME, "--workers", "4", "--steps", "6", "--data", data, "--compute-ms", "10"]
    assert main(["simulate", *words, "--processes", "1", "--quiet", "--json", str(told)]) == 0
    assert json.loads(told.read_text())


def test_the_training_example_takes_it(tmp_path: Path) -> None:
    """The script finds the algorithm by its name, as both are in one folder."""
    saved = tmp_path / "saved"
    words = ("--epochs", "1", "--algorithm", NAME, "--set", "interval=2", "--checkpoint", str(saved))
    done = launch("run", "-np", "2", "--", *forked.python(), str(EXAMPLES / "train.py"), *words)
    assert done.returncode == 0, done.stderr
    assert saved.exists()
