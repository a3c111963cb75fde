"""Local SGD whose averagings are encoded: against DiLoCo and float64, error feedback, its state, and failures."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.diloco import Layers, same_parameters, sgd
from checks.diloco import train as train_layers
from checks.local_sgd import reference
from checks.odd import OPTIMIZERS, Odd, divisors, same_models, step, train, twin_of, wrap
from checks.registry import Seat, check
from sordino.algorithms import DiLoCo, LocalSGD
from sordino.codecs import Codec, Float16, Int4, Int8, Sign, TopK, TwoBit
from sordino.errors import NonFinite, PeerLost, UsageError

EXACT = TopK(ratio=1.0, chunk=32, bits=32)
LOSSY = (Int8(32), Sign(32), TopK(0.1, 64))


def steps_of(optimizer: hvd.DistributedOptimizer) -> Any:
    return optimizer._strategy


def outer_of(optimizer: hvd.DistributedOptimizer) -> dict[str, torch.Tensor]:
    outer: dict[str, torch.Tensor] = optimizer.state_dict()["sordino"]["outer"]
    return outer


@check(
    least=2,
    codec=(Float16(), Int8(32), Int4(), TwoBit(), Sign(32), TopK(0.1, 128)),
    dtype=(torch.float32, torch.bfloat16, torch.float64),
)
def it_is_diloco_without_momentum(seat: Seat, codec: Codec, dtype: torch.dtype) -> None:
    """The models are those of DiLoCo with rate 1, bit for bit."""
    models = [Layers(dtype=dtype) for _ in range(2)]
    given = {"interval": 2, "compression": codec}
    outer = DiLoCo(outer_lr=1.0, outer_momentum=0.0, **given)
    for model, algorithm in zip(models, (LocalSGD(exchange="allreduce", **given), outer)):
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)
        train_layers(seat, model, optimizer, range(7))
    assert same_parameters(*models)


@check(least=2, exchange=("sharded", "allreduce"), start=("immediate", 3), aggregate=("parameters", "gradients"))
def groups_follow_the_formula(seat: Seat, exchange: str, start: Any, aggregate: str) -> None:
    for k in divisors(seat.size):
        algorithm = LocalSGD(2, k, exchange, start, aggregate, compression=EXACT)
        model = train(seat, algorithm, 8, lambda p: torch.optim.SGD(p, lr=0.02))
        wanted = reference(seat.size, algorithm, 8, 0.02)[seat.rank // k]
        for parameter, value in zip(model.parameters(), wanted):
            torch.testing.assert_close(parameter.double(), value, atol=1e-5, rtol=1e-4)


@check(least=2, codec=LOSSY, exchange=("sharded", "allreduce"))
def models_are_equal_after_an_averaging(seat: Seat, codec: Codec, exchange: str) -> None:
    """The models are equal bit for bit, and have left their start."""
    for k in divisors(seat.size):
        model = Odd()
        optimizer = wrap(model, LocalSGD(3, k, exchange, compression=codec, bucket_bytes=200), OPTIMIZERS["sgd"])
        for turn in range(7):
            step(seat, model, optimizer, turn)
            if turn % 3 == 2 and k < seat.size:
                seat.same("model", *model.parameters())
        assert any(not torch.equal(mine, first) for mine, first in zip(model.parameters(), Odd().parameters()))


@check(least=2, codec=(TwoBit(32), Sign(32), TopK(0.1, 64)))
def what_an_encoding_has_lost_is_sent_later(seat: Seat, codec: Codec) -> None:
    """The movement of the common model and the residuals add up to the mean changes of the workers."""
    parameter = torch.nn.Parameter(torch.zeros(300))
    inner = torch.optim.SGD([parameter], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, [("w", parameter)], algorithm=LocalSGD(2, compression=codec))
    wanted = torch.zeros(300, dtype=torch.float64)
    for turn in range(12):
        generators = [torch.Generator().manual_seed(100 * turn + rank) for rank in range(seat.size)]
        gradients = [torch.randn(300, generator=one) for one in generators]
        parameter.grad = gradients[seat.rank].clone()
        optimizer.step()
        wanted -= torch.stack(gradients).double().mean(0)
    (mean,) = steps_of(optimizer)._averaging._fragments[0].mean.encoded
    left = hvd.allreduce(mean.residuals[0][:300].double(), name="left")
    if len(mean.residuals) > 1:
        left += hvd.allgather(mean.residuals[1].double(), name="left of means")[:300]
    torch.testing.assert_close(parameter.detach().double() + left, wanted, atol=1e-4, rtol=1e-4)
    assert left.abs().max() > 0.1  # so the residuals were needed


@check(least=2, exchange=("sharded", "allreduce"))
def a_checkpoint_has_the_outer_parameters(seat: Seat, exchange: str) -> None:
    """The state has them by name, each whole, and equal on all ranks. Training that resumes within an interval is the
    same, bit for bit; from other outer parameters it is not."""
    codec = Float16() if exchange == "sharded" else Int8(32)  # shards are cut anew, with other blocks
    algorithm = LocalSGD(3, divisors(seat.size)[-2], exchange, compression=codec)
    model = Odd()
    optimizer = wrap(model, algorithm)
    for turn in range(4):
        step(seat, model, optimizer, turn)
        if turn == 2:
            after = {name: value.detach().clone() for name, value in model.named_parameters()}
    outer = outer_of(optimizer)
    assert outer.keys() == after.keys()
    for name, value in outer.items():
        assert torch.equal(value, after[name]) and value.stride() == after[name].stride(), name
        seat.same(name, value)
    twin, resumed = twin_of(model, optimizer, algorithm, OPTIMIZERS["momentum"])
    other, forgetful = twin_of(model, optimizer, algorithm, OPTIMIZERS["momentum"])
    state = copy.deepcopy(forgetful.state_dict())
    for value in state["sordino"]["outer"].values():
        value += 0.5
    forgetful.load_state_dict(state)
    for turn in range(4, 8):
        for one, its in ((model, optimizer), (twin, resumed), (other, forgetful)):
            step(seat, one, its, turn)
    assert same_models(model, twin) and not same_models(model, other)


@check(least=2, exchange=("sharded", "allreduce"))
def another_number_of_groups_loads_it(seat: Seat, exchange: str) -> None:
    """Outer parameters of shards are loaded by ranks that have whole models, and the other way round."""
    group = divisors(seat.size)[-2]
    other = LocalSGD(3, group, "allreduce" if exchange == "sharded" else "sharded", compression=Int8(32))
    model = Odd()
    optimizer = wrap(model, LocalSGD(3, group, exchange, compression=Sign(32)))
    for turn in range(4):
        step(seat, model, optimizer, turn)
    outer = copy.deepcopy(outer_of(optimizer))
    twin, resumed = twin_of(model, optimizer, other, OPTIMIZERS["momentum"])
    for saved in (outer_of(resumed), (step(seat, twin, resumed, 4), outer_of(resumed))[1]):
        assert saved.keys() == outer.keys()
        assert all(torch.equal(saved[name], value) for name, value in outer.items())


@check(least=2)
def ranks_that_start_from_different_weights(seat: Seat) -> None:
    """As without a codec, the first averaging is the mean of all models."""
    for codec in (None, EXACT):
        parameter = torch.nn.Parameter(torch.full((40,), float(seat.rank)))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0), [("w", parameter)], algorithm=LocalSGD(2, compression=codec)
        )
        for _ in range(2):
            parameter.grad = torch.ones(40)
            optimizer.step()
        torch.testing.assert_close(parameter.detach(), torch.full((40,), (seat.size - 1) / 2 - 2))


@check(least=2, exchange=("sharded", "allreduce"), aggregate=("parameters", "gradients"))
def parameters_that_are_unfrozen_later(seat: Seat, exchange: str, aggregate: str) -> None:
    """Unfrozen parameters are averaged from then on, and the others keep their outer parameters."""
    k = divisors(seat.size)[-2]
    model, plain = Odd(), Odd()
    optimizers = []
    for one, codec in ((model, EXACT), (plain, None)):
        one.image.requires_grad_(False)
        algorithm = LocalSGD(4, k, exchange, aggregate=aggregate, compression=codec)
        optimizers.append(wrap(one, algorithm, lambda p: torch.optim.SGD(p, lr=0.001)))
    for turn in range(9):
        if turn == 6:
            model.image.requires_grad_(True)
            plain.image.requires_grad_(True)
        for one, its in zip((model, plain), optimizers):
            step(seat, one, its, turn)
        if turn == 7:
            seat.same("model", *model.parameters())
            for mine, wanted in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-4)
    assert outer_of(optimizers[0]).keys() == {name for name, _ in model.named_parameters()}


@check(least=2, exchange=("sharded", "allreduce"))
def parameters_that_were_replaced(seat: Seat, exchange: str) -> None:
    algorithm = LocalSGD(2, divisors(seat.size)[-2], exchange, compression=Int8(32))
    plain, replaced = Odd(), Odd()
    optimizers = [wrap(model, algorithm, OPTIMIZERS["sgd"]) for model in (plain, replaced)]
    for turn in range(5):
        for model, optimizer in zip((plain, replaced), optimizers):
            step(seat, model, optimizer, turn)
        assert same_models(plain, replaced)
        for parameter in replaced.parameters():
            parameter.data = parameter.data.clone()
        for name, value in outer_of(optimizers[1]).items():
            assert torch.equal(value, outer_of(optimizers[0])[name])


@check(least=2)
def buffers_are_not_encoded(seat: Seat) -> None:
    model, buffer = Odd(), torch.zeros(3)
    algorithm = LocalSGD(2, buffers="average", compression=Sign(32))
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](list(model.parameters())),
        model.named_parameters(),
        algorithm=algorithm,
        named_buffers=[("mean", buffer)],
    )
    for turn in range(2):
        buffer.copy_(torch.tensor([1.0, 100.0, 1e-3]) * (seat.rank + 1))
        step(seat, model, optimizer, turn)
    torch.testing.assert_close(buffer, torch.tensor([1.0, 100.0, 1e-3]) * (seat.size + 1) / 2)


@check(least=2)
def a_nan_is_a_nan_on_all_ranks(seat: Seat) -> None:
    for check_finite in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(96))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=1.0),
            [("w", parameter)],
            algorithm=LocalSGD(1, compression=Int8(32)),
            check_finite=check_finite,
        )
        parameter.grad = torch.ones(96)
        if seat.rank == 0:
            parameter.grad[5] = math.nan
        if check_finite:
            raises(NonFinite, "", optimizer.step)
            assert parameter.isfinite().all() or seat.rank == 0
            continue
        optimizer.step()
        assert parameter[5].isnan() and torch.equal(parameter[32:].detach(), -torch.ones(64))


@check(least=2, codec=(Int8(32), Sign(32), TopK(0.2, 64)))
def a_failed_averaging_changes_nothing(seat: Seat, codec: Codec) -> None:
    """A rank leaves before the averaging. The others keep their parameters, outer parameters and residuals."""
    model = Layers()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), algorithm=LocalSGD(2, exchange="allreduce", compression=codec)
    )
    train_layers(seat, model, optimizer, range(3))
    (mean,) = steps_of(optimizer)._averaging._fragments[0].mean.encoded
    if seat.rank < seat.last:
        outer, residuals = copy.deepcopy((outer_of(optimizer), mean.residuals))
        own: list[torch.Tensor] = []
        optimizer.register_step_post_hook(lambda *_: own.extend(p.detach().clone() for p in model.parameters()))
        seat.meet("has left")
        with pytest.raises(PeerLost):
            train_layers(seat, model, optimizer, range(3, 4))
        assert own and all(map(torch.equal, own, model.parameters()))
        assert all(torch.equal(value, outer[name]) for name, value in outer_of(optimizer).items())
        assert all(map(torch.equal, residuals, mean.residuals))
    else:
        hvd.shutdown()
        seat.meet("has left")
    seat.meet("all have failed")
    hvd.shutdown()
    if seat.transport == "processes":
        hvd.init()


@check()
def settings_of_encoded_averagings(seat: Seat) -> None:
    algorithm = LocalSGD(compression="int4")
    assert algorithm.written() == "LocalSGD(interval=8, group_size=1, compression=Int4(block=128))"
    assert LocalSGD(compression="none") == LocalSGD()
    raises(UsageError, "no such codec", LocalSGD, compression="int5")
    raises(UsageError, "must be a codec", LocalSGD, compression=3)
    counted = TopK(contributors=True)
    raises(UsageError, "must have contributors=False", LocalSGD, aggregate="gradients", compression=counted)
    assert "compression=" in (LocalSGD(compression="int8").traits.whole_parameters or "")
    assert LocalSGD().traits.whole_parameters is None
    if seat.size > 1:
        codec = Int8(64) if seat.rank == 0 else Int8(32)
        raises(hvd.ConfigurationMismatch, "compression", wrap, Odd(), LocalSGD(compression=codec))
