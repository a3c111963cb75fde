"""LARS against its formula in float64 numpy, against torch's SGD where both are equal, and as an optimizer of
torch.optim."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sordino.torch as hvd
from sordino import checkpoint, sim
from sordino.errors import UsageError
from sordino.torch.lars import LARS

SHAPES = [(4, 3), (2, 3, 3, 3), (5,), (), (1, 1), (0, 3), (64,), (6, 1)]
PLAIN: dict[str, Any] = {
    "lr": 0.5,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "trust_coefficient": 0.001,
    "eps": 1e-9,
    "nesterov": False,
    "layerwise": None,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no momentum": {"momentum": 0.0},
    "decay": {"weight_decay": 0.01},
    "decay without momentum": {"momentum": 0.0, "weight_decay": 0.3},
    "nesterov": {"nesterov": True, "weight_decay": 0.01},
    "all scaled": {"layerwise": True, "weight_decay": 0.01},
    "none scaled": {"layerwise": False, "weight_decay": 0.01, "lr": 0.01},
    "large eps": {"eps": 0.5, "trust_coefficient": 0.0025},
    "no eps": {"eps": 0.0, "trust_coefficient": 0.02},
}


class Reference:
    """One tensor under the formula of the docstring, in float64."""

    def __init__(self, weights: torch.Tensor, options: dict[str, Any]) -> None:
        self.w = weights.detach().double().numpy().copy()
        self.v = np.zeros_like(self.w)
        self.options = {**PLAIN, **options}

    def step(self, gradient: torch.Tensor) -> None:
        o, g = self.options, gradient.detach().double().numpy()
        norm_w, norm_g = np.sqrt((self.w**2).sum()), np.sqrt((g**2).sum())
        local = 1.0
        scaled = self.w.ndim > 1 if o["layerwise"] is None else o["layerwise"]
        if scaled and norm_w > 0 and norm_g > 0:
            local = o["trust_coefficient"] * norm_w / (norm_g + o["weight_decay"] * norm_w + o["eps"])
        change = o["lr"] * local * (g + o["weight_decay"] * self.w)
        self.v = o["momentum"] * self.v + change
        self.w = self.w - (change + o["momentum"] * self.v if o["nesterov"] else self.v)


def make_parameters(
    dtype: torch.dtype = torch.float64, seed: int = 0, shapes: Any = SHAPES
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    """Set gradients that depend only on the step; their sizes differ widely between tensors and steps."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, p in enumerate(parameters):
        size = 10.0 ** ((i + step) % 5 - 2)
        p.grad = (size * torch.randn(p.shape, generator=generator)).to(p.dtype)


def assert_near(p: torch.Tensor, reference: Reference, rtol: float = 1e-12) -> None:
    np.testing.assert_allclose(p.detach().double().numpy(), reference.w, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_follows_the_formula(variant: str) -> None:
    options = VARIANTS[variant]
    parameters = make_parameters()
    references = [Reference(p, options) for p in parameters]
    optimizer = LARS(parameters, **{**PLAIN, **options})
    for step in range(60):
        set_gradients(parameters, step)
        # The rate falls meanwhile: it is inside the momentum.
        lr = optimizer.param_groups[0]["lr"] = {**PLAIN, **options}["lr"] / (1 + step)
        for p, reference in zip(parameters, references):
            reference.options["lr"] = lr
            reference.step(p.grad)
        optimizer.step()
        for p, reference in zip(parameters, references):
            assert_near(p, reference)


def test_the_defaults_are_those_it_documents() -> None:
    group = LARS(make_parameters(), lr=0.5).param_groups[0]
    assert {key: value for key, value in group.items() if key != "params"} == PLAIN


def test_every_group_has_its_own_options() -> None:
    groups = [make_parameters(seed=seed) for seed in range(len(VARIANTS))]
    references = [[Reference(p, o) for p in group] for group, o in zip(groups, VARIANTS.values())]
    first, *others = [{"params": p, **PLAIN, **o} for p, o in zip(groups, VARIANTS.values())]
    optimizer = LARS([first, others[0]], lr=123.0)
    for group in others[1:]:
        optimizer.add_param_group(group)
    for step in range(20):
        for parameters, expected in zip(groups, references):
            set_gradients(parameters, step)
            for p, reference in zip(parameters, expected):
                reference.step(p.grad)
        optimizer.step()
    for parameters, expected in zip(groups, references):
        for p, reference in zip(parameters, expected):
            assert_near(p, reference)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)]
)
def test_all_floating_types(dtype: torch.dtype, rtol: float) -> None:
    options = {"weight_decay": 0.01, "lr": 1.0, "trust_coefficient": 0.01}
    parameters = make_parameters(dtype)
    # Several types in a group; the norms of the last one do not fit the others' type.
    single, double = make_parameters(torch.float32, seed=1), make_parameters(torch.float64, seed=2)
    everything = parameters + single + double
    references = [Reference(p, options) for p in everything]
    optimizer = LARS(everything, **{**PLAIN, **options})
    for step in range(8):
        set_gradients(everything, step)
        for p, reference in zip(everything, references):
            if p.dim() < 2:
                p.grad.mul_(1e-3)
            reference.step(p.grad)
        optimizer.step()
    tolerances = [rtol] * len(parameters) + [1e-5] * len(single) + [1e-12] * len(double)
    for p, reference, tolerance in zip(everything, references, tolerances):
        assert p.dtype == optimizer.state[p]["momentum_buffer"].dtype
        assert_near(p, reference, tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_are_taken_in_single(dtype: torch.dtype) -> None:
    """128 000 is infinite as a float16, and three digits cannot distinguish 1 from 1.001."""
    weights, gradient = torch.full((64, 64), 2000.0, dtype=dtype), torch.full((64, 64), 1000.0, dtype=dtype)
    weights[0, 0], gradient[0, 0] = 6000.0, 0.0
    p = torch.nn.Parameter(weights.clone())
    p.grad = gradient
    LARS([p], lr=1.0, momentum=0.0, trust_coefficient=0.5).step()
    rate = 0.5 * weights.double().norm() / gradient.double().norm()
    expected = (weights - (gradient * rate.item())).double()
    assert torch.equal(p.detach().double(), expected)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_zero_norm_means_a_local_rate_of_one(decay: float) -> None:
    born_zero = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    no_gradient = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    born_zero.grad, no_gradient.grad = torch.full_like(born_zero, 3.0), torch.zeros_like(no_gradient)
    LARS([born_zero, no_gradient], lr=0.5, momentum=0.0, weight_decay=decay, eps=0.0).step()
    np.testing.assert_allclose(born_zero.detach().numpy(), np.full((3, 2), -1.5), rtol=1e-15)
    np.testing.assert_allclose(no_gradient.detach().numpy(), np.full((3, 2), 1 - 0.5 * decay), rtol=1e-15)


def test_a_step_is_a_fraction_of_the_norm_whatever_the_size_of_the_gradient() -> None:
    for size in (1e-30, 1.0, 1e30):
        (p,) = make_parameters(shapes=[(7, 5)])
        before = p.detach().clone()
        p.grad = size * torch.ones_like(p)
        LARS([p], lr=0.5, momentum=0.9, trust_coefficient=0.02, eps=0.0).step()
        assert ((p.detach() - before).norm() / before.norm()).item() == pytest.approx(0.01, rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"nesterov": True, "weight_decay": 0.1}])
def test_without_scaling_it_is_torchs_sgd(options: dict[str, Any]) -> None:
    mine, theirs = make_parameters(), make_parameters()
    optimizers = (
        LARS(mine, lr=0.02, momentum=0.9, layerwise=False, **options),
        torch.optim.SGD(theirs, lr=0.02, momentum=0.9, **options),
    )
    for step in range(20):
        for parameters, optimizer in zip((mine, theirs), optimizers):
            set_gradients(parameters, step)
            optimizer.step()
    for p, q in zip(mine, theirs):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_any_memory_layout() -> None:
    base = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    weights = [torch.randn(3, 4, dtype=torch.float64).t(), base.to(memory_format=torch.channels_last)]
    parameters = [torch.nn.Parameter(w) for w in weights]
    assert not any(p.is_contiguous() for p in parameters)
    references = [Reference(p, {}) for p in parameters]
    optimizer = LARS(parameters, lr=0.5)
    for step in range(5):
        set_gradients(parameters, step)
        for p, reference in zip(parameters, references):
            reference.step(p.grad)
        optimizer.step()
    for p, reference in zip(parameters, references):
        assert optimizer.state[p]["momentum_buffer"].stride() == p.stride()
        assert_near(p, reference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_with_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    straight = make_parameters(dtype)
    optimizer = LARS(straight, lr=0.5, weight_decay=0.01)
    for step in range(4):
        set_gradients(straight, step)
        optimizer.step()
    checkpoint.save(tmp_path / "half-way", {"optimizer": optimizer.state_dict(), "weights": [*straight]})
    loaded = checkpoint.load(tmp_path / "half-way")
    resumed = [torch.nn.Parameter(w) for w in loaded["weights"]]
    other = LARS(resumed, lr=9.0, momentum=0.1)
    other.load_state_dict(loaded["optimizer"])
    assert other.param_groups[0]["lr"] == 0.5
    for step in range(4, 8):
        for parameters, each in ((straight, optimizer), (resumed, other)):
            set_gradients(parameters, step)
            each.step()
    assert all(torch.equal(p, q) for p, q in zip(straight, resumed))
    buffers = [[o.state[p]["momentum_buffer"] for p in ps] for o, ps in ((optimizer, straight), (other, resumed))]
    assert all(torch.equal(v, u) for v, u in zip(*buffers))


def test_a_deep_copy_lives_its_own_life() -> None:
    parameters = make_parameters()
    optimizer = LARS(parameters, lr=0.5)
    set_gradients(parameters, 0)
    optimizer.step()
    copied_parameters, copied = copy.deepcopy((parameters, optimizer))
    frozen = [p.detach().clone() for p in parameters]
    set_gradients(copied_parameters, 1)
    copied.step()
    assert all(torch.equal(p, before) for p, before in zip(parameters, frozen))
    set_gradients(parameters, 1)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, copied_parameters))


def test_parameters_without_a_gradient_are_left_alone() -> None:
    used, late = make_parameters(shapes=[(3, 3), (3, 3)])
    references = [Reference(p, {"weight_decay": 0.1}) for p in (used, late)]
    optimizer = LARS([used, late], lr=0.5, weight_decay=0.1)
    optimizer.step()
    assert not optimizer.state
    for step in range(4):
        set_gradients([used, late], step)
        if step < 2:
            late.grad = None
        for p, reference in zip((used, late), references):
            if p.grad is not None:
                reference.step(p.grad)
        optimizer.step()
        assert (late in optimizer.state) == (step >= 2)
        assert_near(used, references[0])
        assert_near(late, references[1])


def test_a_closure_runs_once_with_gradients_before_the_step() -> None:
    (p,) = make_parameters(shapes=[(3, 2)])
    reference = Reference(p, {})
    optimizer = LARS([p], lr=0.5)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    for _ in range(3):
        reference.step(2 * p.detach())
        assert optimizer.step(closure) is calls[-1]
        assert_near(p, reference)
    assert len(calls) == 3


def test_the_number_of_launches_does_not_grow_with_the_number_of_tensors() -> None:
    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    def launches(tensors: int) -> list[str]:
        parameters = make_parameters(shapes=[(3, 2), (4,)] * tensors)
        optimizer = LARS(parameters, lr=0.5, weight_decay=0.1)
        for step in range(2):
            set_gradients(parameters, step)
            if step == 0:
                optimizer.step()  # makes the buffers
        with Count() as count:
            optimizer.step()
        return count.names

    assert launches(1) == launches(50)
    assert len([name for name in launches(1) if "_foreach_norm" in name]) == 1


def test_training_with_all_ranks_is_training_on_the_average() -> None:
    def gradients(parameters: list[torch.nn.Parameter], step: int, rank: int) -> list[torch.Tensor]:
        set_gradients(parameters, 10 * step + rank)
        return [p.grad for p in parameters]

    def body() -> list[torch.Tensor]:
        parameters = make_parameters(shapes=[(4, 3), (5,)])
        optimizer = hvd.DistributedOptimizer(LARS(parameters, lr=0.5, weight_decay=0.01))
        for step in range(5):
            weights = gradients(make_parameters(shapes=[(4, 3), (5,)]), step, hvd.rank())
            optimizer.zero_grad()
            sum((p * w).sum() for p, w in zip(parameters, weights)).backward()
            optimizer.step()
        return [p.detach() for p in parameters]

    parameters = make_parameters(shapes=[(4, 3), (5,)])
    references = [Reference(p, {"weight_decay": 0.01}) for p in parameters]
    for step in range(5):
        both = [gradients(parameters, step, rank) for rank in range(2)]
        for reference, mine, theirs in zip(references, *both):
            reference.step((mine + theirs) / 2)
    for result in sim.run(2, body):
        for p, reference in zip(result, references):
            assert_near(p, reference)


def embedding() -> torch.nn.Parameter:
    layer = torch.nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    return layer.weight


def complex_parameter() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    return p


@pytest.mark.parametrize(("make", "words"), [(embedding, "sparse gradient"), (complex_parameter, "complex")])
def test_what_it_cannot_train_stops_the_step_before_anything_moves(
    make: Callable[[], torch.nn.Parameter], words: str
) -> None:
    (good,) = make_parameters(shapes=[(3, 2)])
    set_gradients([good], 0)
    before = good.detach().clone()
    optimizer = LARS([{"params": [good]}, {"params": [make()]}], lr=0.5)
    with pytest.raises(UsageError, match=rf"shape \(\d, 2\) in parameter group 1.*{words}"):
        optimizer.step()
    assert torch.equal(good, before) and not optimizer.state


WRONG = [
    ("lr", -0.1),
    ("lr", float("nan")),
    ("lr", float("inf")),
    ("lr", "0.1"),
    ("lr", True),
    ("lr", torch.tensor(0.1)),
    ("momentum", -0.1),
    ("momentum", 1.0),
    ("weight_decay", -1e-4),
    ("weight_decay", None),
    ("trust_coefficient", 0.0),
    ("trust_coefficient", -0.001),
    ("eps", -1e-9),
    ("layerwise", "yes"),
    ("layerwise", 2),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_hyper_parameter_is_named(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"LARS\({field}=.*in parameter group 0"):
        LARS(make_parameters(), **{"lr": 0.1, field: value})
    optimizer = LARS(make_parameters(), lr=0.1)
    with pytest.raises(UsageError, match=rf"LARS\({field}=.*in parameter group 1"):
        optimizer.add_param_group({"params": make_parameters(), field: value})
    assert len(optimizer.param_groups) == 1


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(UsageError, match=r"nesterov=True.*momentum above 0"):
        LARS(make_parameters(), lr=0.1, momentum=0.0, nesterov=True)
