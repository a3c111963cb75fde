"""Options of the optimizer, kinds of parameters and calls that meet in one training, on ranks that are threads."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import (
    Algorithm,
    AllReduce,
    CaPS,
    Crossover,
    DiLoCo,
    Layered,
    LocalSGD,
    NoLoCo,
)
from sordino.algorithms.noloco.outer import _Parameter
from sordino.runtime.context import current
from sordino.runtime.exchange.flat_buffer import ParameterBuffer, require_unchanged
from sordino.runtime.parameter_names import finder
from sordino.torch import functions

# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [AllReduce(), LocalSGD(group_size=2), Layered()], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_group_may_have_several_dtypes(algorithm: Algorithm, groups: int) -> None:
    def work() -> None:
        kinds = (torch.float32, torch.bfloat16, torch.float64, torch.bfloat16)
        tensors = [nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in kinds]
        sgd, named = torch.optim.SGD(tensors, lr=1.0), [(f"p{i}", one) for i, one in enumerate(tensors)]
        optimizer = hvd.DistributedOptimizer(sgd, named, algorithm=algorithm, groups=groups)
        sum((i + 1) * (hvd.rank() + 1) * one.sum().double() for i, one in enumerate(tensors)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.flush()
        assert [one.tolist() for one in tensors] == [[-1.5 * (i + 1)] * 5 for i in range(4)]

    sim.run(2, work)


def test_changes_below_a_rounding_error_add_up() -> None:
    """Outer parameters are in float32. The model in 16 bits follows them as soon as it can."""

    def work() -> None:
        weight = nn.Parameter(torch.full((8,), 256.0, dtype=torch.bfloat16))  # its neighbors are 2 away
        algorithm = DiLoCo(interval=1, outer_lr=0.25, outer_momentum=0.0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=2.0), [("w", weight)], algorithm=algorithm)
        for step in range(1, 17):
            weight.grad = torch.full_like(weight, -1.0 if hvd.rank() == 0 else 0.0)
            optimizer.step()
            (outer,) = optimizer.state_dict()["sordino"]["outer"]
            assert outer.tolist() == [256 + 0.25 * step] * 8
        assert weight.tolist() == [260.0] * 8

    sim.run(2, work)


@pytest.mark.parametrize("pull", [1.0, 0.6])
def test_rounding_is_no_change_of_a_model(pull: float) -> None:
    """NoLoCo: outer parameters that lie between two values of 16 bits stay if no rank moves the model."""
    own, message = torch.full((4,), 256.0, dtype=torch.bfloat16), torch.empty(4, dtype=torch.bfloat16)
    one = _Parameter(own, message)
    one.begin()
    one.outer.fill_(256.7)
    for _ in range(3):
        one.pack(pull)
        one.step(0.7, 0.5, pull)
    torch.testing.assert_close(one.outer, torch.full((4,), 256.7), rtol=1e-7, atol=0)


# ---- gradients of shards ---------------------------------------------------------------------------------------------


def stepped(change: Callable[[nn.Module, hvd.DistributedOptimizer], object], algorithm: Algorithm) -> torch.Tensor:
    """Return the parameters after a step on clipped gradients."""
    model = nn.Linear(6, 5)
    with torch.no_grad():
        for parameter in model.parameters():  # not by torch's generator, which the threads of all ranks share
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
    model(torch.full((2, 6), hvd.rank() + 1.0)).square().sum().backward()
    optimizer.clip_grad_norm_(0.5)
    change(model, optimizer)
    with optimizer.skip_synchronize():
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_clipped_gradients_of_shards() -> None:
    """A rank has only its own part of the gradients until it calls `synchronize()`."""

    def read(model: nn.Module, _: object) -> None:
        with pytest.raises(hvd.StepOrderError, match=r"optimizer.synchronize\(\)"):
            model.weight.grad.norm()  # type: ignore[union-attr, operator]

    def work_on_nan() -> None:
        model = nn.Linear(6, 5)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=LocalSGD(group_size=2))
        model(torch.full((2, 6), torch.nan)).sum().backward()
        with pytest.raises(RuntimeError, match="not finite"):
            optimizer.clip_grad_norm_(0.5, error_if_nonfinite=True)
        read(model, None)

    def add(model: nn.Module, optimizer: hvd.DistributedOptimizer) -> None:
        optimizer.synchronize()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(0.25)

    def work() -> None:
        stepped(read, LocalSGD(group_size=2))
        torch.testing.assert_close(stepped(add, LocalSGD(group_size=2)), stepped(add, AllReduce()))

    sim.run(2, work)
    sim.run(2, work_on_nan)


# ---- states by the names of parameters -------------------------------------------------------------------------------


def trained(algorithm: Algorithm, wrapper: str | None, state: Any, steps: range) -> tuple[Any, torch.Tensor]:
    """Return the state and the parameters after these steps. `wrapper` is a prefix of all names; None: no names."""
    weight = nn.Parameter(torch.zeros(6) if state is None else state[1].clone())
    named = None if wrapper is None else [(f"{wrapper}w", weight)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), named, algorithm=algorithm)
    if state is not None:
        optimizer.load_state_dict(state[0])
    for step in steps:
        weight.grad = torch.sin(torch.arange(6.0) * (hvd.rank() + 1) + step)
        optimizer.step()
    return copy.deepcopy(optimizer.state_dict()), weight.detach().clone()


@pytest.mark.parametrize(
    "algorithm", [LocalSGD(4, aggregate="gradients"), LocalSGD(4, compression="int8"), NoLoCo(4)], ids=str
)
def test_a_state_is_found_by_names_that_a_wrapper_has_changed(algorithm: Algorithm) -> None:
    def work() -> None:
        state = trained(algorithm, "", None, range(6))
        _, wanted = trained(algorithm, "", state, range(6, 9))
        _, found = trained(algorithm, "_orig_mod.", state, range(6, 9))
        assert torch.equal(found, wanted)

    def without_names() -> None:
        trained(algorithm, None, trained(algorithm, "", None, range(6)), range(6, 9))

    sim.run(2, work)
    with pytest.warns(RuntimeWarning, match="are of other parameters"):
        sim.run(2, without_names)


def test_a_rank_without_elements_of_a_model_finds_nothing_missing() -> None:
    """Its shard is padding."""
    algorithm = LocalSGD(4, group_size=2, aggregate="gradients")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        sim.run(4, lambda: trained(algorithm, "", trained(algorithm, "", None, range(6)), range(6, 9)))


def test_names_that_differ_by_wrappers() -> None:
    find = finder({"weight": 1, "module.weight": 2, "bias": 3, "_orig_mod.scale": 4})
    assert [find(name) for name in ("weight", "module.weight", "_orig_mod.weight")] == [1, 2, None]
    assert [find(name) for name in ("_orig_mod.bias", "scale", "bias", "shift")] == [3, 4, 3, None]


# ---- segments --------------------------------------------------------------------------------------------------------


def test_patterns_may_match_frozen_parameters_only() -> None:
    def work() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = Crossover(segments=["0.*", "1.*"])
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            model[0].requires_grad_(True)
            model[1].requires_grad_(False)

    sim.run(2, work)


def test_buffers_are_in_the_segments_of_their_modules() -> None:
    def work() -> None:
        names = [f"{kind}layers.{layer}.norm" for kind in ("", "buffer ") for layer in range(5)]
        tensors = [torch.zeros(3) for _ in names]
        arena = ParameterBuffer(current(), names, tensors, "blocks", buffers=5)
        assert arena.segment_count == 5
        assert arena.plain_names[:2] == ["layers.0.norm", "buffer layers.0.norm"]

    sim.run(2, work)


# ---- optimizers ------------------------------------------------------------------------------------------------------


class Plain(torch.optim.Optimizer):
    """An optimizer without a learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad)


def test_no_learning_rate_is_needed() -> None:
    def work() -> None:
        for algorithm in (LocalSGD(1), CaPS()):
            weight = nn.Parameter(torch.zeros(4))
            optimizer = hvd.DistributedOptimizer(Plain([weight]), [("w", weight)], algorithm=algorithm)
            weight.grad = torch.full_like(weight, hvd.rank() + 1.0)
            optimizer.step()
            assert weight.tolist() == [-1.5] * 4
            if isinstance(algorithm, CaPS):
                optimizer.report_metric(1.0)
        weight = nn.Parameter(torch.zeros(4))
        decays = hvd.DistributedOptimizer(Plain([weight]), [("w", weight)], algorithm=LocalSGD(1, start="decay"))
        with pytest.raises(hvd.UsageError, match="needs a learning rate, and the first parameter group has no lr"):
            decays.step()

    sim.run(2, work)


def test_a_step_that_fails_leaves_no_scale_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step would divide by the scale again."""

    def work() -> None:
        weight = nn.Parameter(torch.zeros(4))
        sgd = torch.optim.SGD([weight], lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, [("w", weight)], algorithm=Crossover())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale((weight * (hvd.rank() + 1)).sum()).backward()
        begin = optimizer._strategy.begin
        optimizer._strategy.begin = lambda _: 1 / 0  # type: ignore[method-assign, assignment, misc]
        with pytest.raises(ZeroDivisionError):
            scaler.step(optimizer)
        optimizer._strategy.begin = begin  # type: ignore[method-assign]
        weight.grad = torch.full_like(weight, hvd.rank() + 1.0)
        optimizer.step()
        assert weight.tolist() == [-1.5] * 4

    sim.run(2, work)


def test_stale_parameters_of_integers_stay() -> None:
    def work() -> None:
        weight, codes = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
        sgd, named = torch.optim.SGD([weight, codes], lr=1.0), [("w", weight), ("codes", codes)]
        optimizer = hvd.DistributedOptimizer(sgd, named, algorithm=Layered(check_stale=True))
        for _ in range(2):
            weight.grad = torch.full_like(weight, hvd.rank() + 1.0)
            optimizer.step()
        optimizer.flush()
        assert weight.tolist() == [-3.0] * 4 and codes.tolist() == [1] * 4

    sim.run(2, work)


# ---- what cannot be --------------------------------------------------------------------------------------------------


def test_groups_divide_the_ranks() -> None:
    def work() -> None:
        weight = nn.Parameter(torch.zeros(4))
        sgd = torch.optim.SGD([weight], lr=1.0)
        with pytest.raises(hvd.UsageError, match=r"DiLoCo\(group_size=2\): does not divide 3 ranks"):
            hvd.DistributedOptimizer(sgd, [("w", weight)], algorithm=DiLoCo(group_size=2))

    sim.run(3, work)


def test_gradients_that_are_sent_for_some_steps_only() -> None:
    def work() -> None:
        weight = nn.Parameter(torch.zeros(4))
        sgd = torch.optim.SGD([weight], lr=1.0)
        with pytest.raises(hvd.UsageError, match=r"LocalSGD\(start=9\) without groups sends gradients only until"):
            hvd.DistributedOptimizer(sgd, [("w", weight)], algorithm=LocalSGD(start=9), compression="int8")

    sim.run(2, work)


@pytest.mark.parametrize("unused", [False, True])
def test_a_model_that_moves_to_another_device_is_told_of(unused: bool) -> None:
    """This holds even if the first parameter of a bucket has no gradient."""

    def work() -> None:
        model = nn.Linear(3, 3)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        for bucket in optimizer._strategy.reducer._buckets:  # type: ignore[union-attr]
            bucket.ordinal = 0  # as if the model had been on the first GPU
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        if unused:
            first = optimizer._strategy.reducer._buckets[0].members[0]  # type: ignore[union-attr,index]
            loss = list(model.parameters())[1 - first].sum()
        with pytest.raises(hvd.UsageError, match=r"has moved from .* to cpu since its gradient was first reduced"):
            loss.backward()
            optimizer.step()

    sim.run(2, work)


@pytest.mark.parametrize("now", [torch.empty(3), torch.empty(2, dtype=torch.float64), torch.empty(2, device="meta")])
def test_a_parameter_that_has_changed_does_not_go_back_to_shared_memory(now: torch.Tensor) -> None:
    """For example, the script has moved it to another device. Its shared memory is on the former device."""
    change = rf"from torch.float32 \(2,\) on cpu to {now.dtype} \(.,\) on {now.device} "
    with pytest.raises(hvd.UsageError, match=change):
        require_unchanged(now, torch.empty(2))


def test_hyper_parameters_that_are_tensors_are_sent_like_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank would load a pickled tensor onto the root's device."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(functions, "broadcast_parameters", lambda named, *_: sent.extend(one for _, one in named))

    def work() -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
        optimizer.param_groups[0]["both"] = (torch.tensor(0.25), "text")
        hvd.broadcast_optimizer_state(optimizer, 0)

    sim.run(1, work)
    assert [float(one) for one in sent] == [0.5, 0.25]
