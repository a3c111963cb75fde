"""A wrapper is an ordinary optimizer for the rest of torch: schedulers, GradScaler, hooks, clipping."""

from __future__ import annotations

import torch

import sordino.torch as hvd
from checks.models import loss_of
from checks.registry import Seat, check
from checks.training import Twins, sgd

SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@check(name=SCHEDULERS)
def schedulers(seat: Seat, name: str) -> None:
    twins = Twins(seat)
    mine, theirs = SCHEDULERS[name](twins.optimizer), SCHEDULERS[name](twins.reference)
    rates = []
    for _ in range(6):
        twins.train(1)
        for scheduler in (mine, theirs):
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
        groups = twins.optimizer.param_groups[0], twins.reference.param_groups[0], twins.plain.param_groups[0]
        assert groups[0]["lr"] == groups[1]["lr"] == groups[2]["lr"]
        assert groups[0]["momentum"] == groups[1]["momentum"]
        rates.append(groups[0]["lr"])
    assert len(set(rates)) > 1
    twins.check()
    restored = SCHEDULERS[name](twins.optimizer)
    restored.load_state_dict(mine.state_dict())
    if name != "ReduceLROnPlateau":
        assert restored.get_last_lr() == mine.get_last_lr()


@check(fused=(False, True))
def grad_scaler(seat: Seat, fused: bool) -> None:
    """An infinity on one rank makes all ranks skip the step and shrink the scale. Then they continue with equal
    models."""
    twins = Twins(seat, make=lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=fused))
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000) for _ in range(2)]
    for turn in range(5):
        twins.zero()
        mine, whole = twins.batches()
        before = [p.detach().clone() for p in twins.model.parameters()]
        for model, optimizer, scaler, data, wrong in (
            (twins.model, twins.optimizer, scalers[0], mine, seat.rank == seat.last),
            (twins.twin, twins.reference, scalers[1], whole, True),
        ):
            factor = float("inf") if turn == 2 and wrong else 1.0
            scaler.scale(loss_of(model, *data) * factor).backward()
            if turn % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        seat.same("scale", scalers[0].get_scale())
        unchanged = all(torch.equal(a, b) for a, b in zip(before, twins.model.parameters()))
        assert unchanged == (turn == 2)
    assert scalers[0].get_scale() == 512.0
    twins.check(1e-8)


@check()
def hooks_see_reduced_gradients(seat: Seat) -> None:
    twins = Twins(seat)
    seen = []

    def before(optimizer, arguments, keywords) -> None:
        seen.append("before")
        twins.check_gradients()

    def after(optimizer, arguments, keywords) -> None:
        seen.append("after")

    handles = [twins.optimizer.register_step_pre_hook(before), twins.optimizer.register_step_post_hook(after)]
    handles.append(twins.plain.register_step_post_hook(after))
    twins.train(2)
    assert seen == ["before", "after", "after"] * 2
    for handle in handles:
        handle.remove()
    twins.train(1)
    assert len(seen) == 6
    saved = []
    twins.optimizer.register_state_dict_pre_hook(lambda optimizer: saved.append("state_dict"))
    twins.optimizer.state_dict()
    assert saved == ["state_dict"]
    twins.check()


@check()
def a_hook_on_a_parameter(seat: Seat) -> None:
    """Hooks that were registered before the wrapper change the gradient that is reduced."""

    def triple(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(3)

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        model[0].weight.register_hook(lambda grad: grad * 2)
        model[2].bias.register_post_accumulate_grad_hook(triple)
        return sgd(model)

    twins = Twins(seat, make=make)
    for _ in range(3):
        twins.train(1)
        twins.check_gradients()
    twins.check()


def norms(twins: Twins, limit: float) -> None:
    mine = torch.nn.utils.clip_grad_norm_(twins.model.parameters(), limit)
    theirs = torch.nn.utils.clip_grad_norm_(twins.twin.parameters(), limit)
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
    assert mine > limit, "nothing would be clipped"


@check(skip=(True, False), set_to_none=(True, False))
def clipping_between_synchronize_and_step(seat: Seat, skip: bool, set_to_none: bool) -> None:
    twins = Twins(seat)
    for _ in range(4):
        twins.zero(set_to_none=set_to_none)
        twins.backward()
        twins.optimizer.synchronize()
        norms(twins, 0.1)
        twins.check_gradients()
        if skip:
            with twins.optimizer.skip_synchronize():
                twins.optimizer.step()
        else:  # Horovod would reduce a second time
            twins.optimizer.step()
        twins.reference.step()
        twins.check_gradients()
    twins.check()


@check()
def accumulation_with_skipped_steps(seat: Seat) -> None:
    """Gradients are accumulated locally in several passes, and synchronized by hand."""
    twins = Twins(seat, backward_passes_per_step=2)
    for _ in range(3):
        twins.zero()
        twins.backward()
        twins.backward()
        twins.optimizer.synchronize()
        norms(twins, 0.05)
        with twins.optimizer.skip_synchronize():
            twins.step()
    twins.check()


@check()
def looking_at_gradients_before_step(seat: Seat) -> None:
    """param_groups, as GradScaler and others use it, gives reduced gradients."""
    twins = Twins(seat)
    for _ in range(3):
        twins.zero()
        twins.backward()
        total = sum(p.grad.sum() for group in twins.optimizer.param_groups for p in group["params"])
        seat.same("sum", total)
        twins.step()
    twins.check()


@check()
def looking_at_the_rate_between_backward_passes(seat: Seat) -> None:
    """Reading param_groups in the middle of an accumulation must not end it."""
    twins = Twins(seat, backward_passes_per_step=2)
    for _ in range(3):
        twins.zero()
        twins.backward()
        assert twins.optimizer.param_groups[0]["lr"] == 0.1
        twins.backward()
        twins.step()
    twins.check()


@check()
def attributes_of_the_wrapped_one(seat: Seat) -> None:
    twins = Twins(seat)
    optimizer, plain = twins.optimizer, twins.plain
    assert optimizer.param_groups is plain.param_groups and optimizer.state is plain.state
    assert optimizer.defaults == plain.defaults
    assert "DistributedOptimizer" in repr(optimizer) and "SGD" in repr(optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    assert plain.param_groups[0]["lr"] == 0.05
    optimizer.anything = 5
    assert optimizer.anything == 5 and not hasattr(optimizer, "nothing")
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert hvd.size() == seat.size
