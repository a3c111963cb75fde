"""Copies and states of wrapped optimizers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from algorithm_table import DEFAULTS

import sordino.torch as hvd
from checks.models import MANY, batch, loss_of, make_model, one_step, part
from checks.registry import Seat, check
from checks.training import Twins, sgd
from sordino.algorithms import (
    Algorithm,
    AllReduce,
    Crossover,
    DiLoCo,
    ElasticAveraging,
    Layered,
    LocalSGD,
    NoLoCo,
    SparseLoCo,
)
from sordino.codecs import Codec, Sign, TopK
from sordino.errors import UsageError
from sordino.runtime.collectives.compression import Compressor

NONE = hvd.Compression.none

STATEFUL: dict[str, tuple[Algorithm, Codec | type[Compressor]]] = {
    "gradients": (AllReduce(), TopK(0.1, 32)),
    "local-sgd": (LocalSGD(4), NONE),
    "local-sgd-encoded": (LocalSGD(4, compression=Sign(32)), NONE),
    "local-sgd-sums": (LocalSGD(4, aggregate="gradients"), NONE),
    "diloco": (DiLoCo(4, outer_momentum=0.5, overlap=3), NONE),
    "sparse-loco": (SparseLoCo(4), NONE),
    "noloco": (NoLoCo(4), NONE),
    "elastic-averaging": (ElasticAveraging(4), NONE),
    "crossover": (Crossover(interval=4, compression="int8"), NONE),
}
"""Algorithms with a state, each with the compression of its gradients."""


def go_on(seat: Seat, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    for turn in range(steps):
        optimizer.zero_grad()
        loss_of(model, *part(batch(4 * seat.size, 40 + turn), seat.rank, seat.size)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@check(how=("deepcopy", "pickle", "pickle of a copy", "torch.save"))
def a_copy_trains_on_as_the_original(seat: Seat, how: str) -> None:
    twins = Twins(seat, gradient_predivide_factor=2.0, groups=2)
    twins.train(3)
    pair = (twins.model, twins.optimizer)
    if how == "deepcopy":
        model, optimizer = copy.deepcopy(pair)
    elif how == "torch.save":
        buffer = io.BytesIO()
        torch.save(pair, buffer)
        buffer.seek(0)
        model, optimizer = torch.load(buffer, weights_only=False)
    else:
        model, optimizer = pickle.loads(pickle.dumps(copy.deepcopy(pair) if "copy" in how else pair))
    assert isinstance(optimizer, hvd.DistributedOptimizer)
    untouched = [parameter.detach().clone() for parameter in twins.model.parameters()]
    result = go_on(seat, model, optimizer)
    for mine, before in zip(twins.model.parameters(), untouched):
        assert torch.equal(mine, before), "the copy trains the original's parameters"
    for mine, theirs in zip(go_on(seat, twins.model, twins.optimizer), result):
        assert torch.equal(mine, theirs)
        seat.same("parameter", mine)


def stateful(kind: str) -> tuple[torch.nn.Module, hvd.DistributedOptimizer]:
    algorithm, codec = STATEFUL[kind]
    model = make_model("small", 3)
    return model, hvd.DistributedOptimizer(sgd(model), model.named_parameters(), codec, algorithm=algorithm)


@check(least=2, kind=tuple(STATEFUL), how=("deepcopy", "pickle"))
def a_copy_in_the_middle_of_an_interval(seat: Seat, kind: str, how: str) -> None:
    """A copy also has the algorithm's state and the residuals. So it trains as the original, bit for bit."""
    pair = stateful(kind)
    go_on(seat, *pair, steps=6)
    copied = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    result = go_on(seat, *copied, steps=6)
    for mine, theirs in zip(go_on(seat, *pair, steps=6), result):
        assert torch.equal(mine, theirs)


@check(least=2)
def a_part_of_a_state_cannot_be_copied(seat: Seat) -> None:
    """With shards, a rank has the outer parameters of its part only."""
    model = make_model("small", 3)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)  # without state
    group_size = seat.size if seat.size % 2 else seat.size // 2
    algorithm = LocalSGD(3, group_size, aggregate="gradients")
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), algorithm=algorithm)
    go_on(seat, model, optimizer)
    if algorithm.groups_of(seat.size) > 1 and algorithm.sharded:
        with pytest.raises(UsageError, match="copy its state_dict"):
            copy.deepcopy((model, optimizer))
    seat.meet("copied")


@check()
def a_copy_with_persistent_gradients(seat: Seat) -> None:
    """The copy gets its own gradients if the gradients are in an arena."""
    twins = Twins(seat)
    twins.train(4, set_to_none=False)
    model, optimizer = copy.deepcopy((twins.model, twins.optimizer))
    for mine, theirs in zip(model.parameters(), twins.model.parameters()):
        assert mine.grad is None or mine.grad.data_ptr() != theirs.grad.data_ptr()
    result = go_on(seat, model, optimizer)
    twins.train(2, set_to_none=False)
    twins.check()
    for parameter in result:
        seat.same("parameter", parameter)


@check(least=2)
def a_copy_on_one_rank_only(seat: Seat) -> None:
    """Copying on one rank only, as to keep the best model on rank 0, must not need the other ranks."""
    twins = Twins(seat)
    twins.train(2)
    if seat.rank == 0:
        best = copy.deepcopy((twins.model, twins.optimizer))
        assert pickle.loads(pickle.dumps(twins.optimizer)).state_dict().keys() == best[1].state_dict().keys()
        del best
    twins.train(2)
    twins.check()


@check(label=MANY)
def state_dict_round_trips(seat: Seat, label: str) -> None:
    """A state is loaded into a plain optimizer, from a plain one, and from a file."""
    model = make_model("small", 3)
    optimizer = hvd.DistributedOptimizer(MANY[label](model), model.named_parameters())
    for turn in range(2):
        one_step(model, optimizer, seed=turn)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    plain_model = make_model("small", 9)
    plain = MANY[label](plain_model)
    plain_model.load_state_dict(saved["model"])
    plain.load_state_dict(saved["optimizer"])
    again_model = make_model("small", 5)
    again = hvd.DistributedOptimizer(MANY[label](again_model), again_model.named_parameters())
    again_model.load_state_dict(plain_model.state_dict())
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    # All ranks have the same batch, so averaging changes only the last bits.
    one_step(plain_model, plain, seed=9)
    one_step(model, optimizer, seed=9)
    one_step(again_model, again, seed=9)
    for a, b, c in zip(model.parameters(), plain_model.parameters(), again_model.parameters()):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
        assert torch.equal(a, c)


@check()
def state_loaded_between_backward_and_step(seat: Seat) -> None:
    twins = Twins(seat)
    twins.train(2)
    saved = [copy.deepcopy(each.state_dict()) for each in (twins.optimizer, twins.reference)]
    twins.train(1)
    twins.zero()
    twins.backward()
    twins.optimizer.load_state_dict(saved[0])
    twins.reference.load_state_dict(saved[1])
    twins.train(2)
    twins.check()


@check(set_to_none=(True, False))
def add_param_group(seat: Seat, set_to_none: bool) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)

    twins = Twins(seat, make=make)
    twins.train(3, set_to_none=set_to_none)
    for model, optimizer in ((twins.model, twins.optimizer), (twins.twin, twins.reference)):
        model.zero_grad()
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
    assert len(twins.optimizer.param_groups) == len(twins.plain.param_groups) == 2
    twins.train(4, set_to_none=set_to_none)
    twins.check()
    assert not torch.equal(twins.model[2].bias, twins.start[3])


FITTING = DEFAULTS | {"layered": Layered(group_size=1)}  # its default needs as many ranks on each node


@check(name=tuple(FITTING))
def a_copy_is_changed_before_its_first_step(seat: Seat, name: str) -> None:
    """The copy has not met the other ranks yet; a rank that is alone never meets any."""
    model = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=FITTING[name])
    model, optimizer = copy.deepcopy((model, optimizer))
    optimizer.set_backward_passes_per_step(1)
    late = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late]})
    (model(torch.ones(3)) + late.sum()).sum().backward()
    optimizer.step()
    optimizer.flush()
    assert bool((late < 1).all())


@check()
def wrapping_anew(seat: Seat) -> None:
    """A dropped wrapper releases its parameters."""
    twins = Twins(seat)
    twins.train(2)
    for _ in range(3):
        twins.optimizer = None
        twins.optimizer = hvd.DistributedOptimizer(twins.plain, twins.model.named_parameters())
        twins.train(2)
    twins.check()


@check()
def many_models(seat: Seat) -> None:
    all_twins = [Twins(seat, kind) for kind in ("small", "tied", "conv", "small")]
    for _ in range(3):
        for twins in all_twins:
            twins.zero()
        for twins in reversed(all_twins):
            twins.backward()
        for twins in all_twins:
            twins.step()
    for twins in all_twins:
        twins.check()


@check()
def keeps_existing_state(seat: Seat) -> None:
    """State that the optimizer already has is kept; Horovod drops it."""
    model, twin = make_model("small", 3), make_model("small", 3)
    plain, reference = sgd(model), sgd(twin)
    for turn in range(2):
        one_step(model, plain, seed=turn)
        one_step(twin, reference, seed=turn)
    plain.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.01
    optimizer = hvd.DistributedOptimizer(plain)
    one_step(model, optimizer, seed=5)
    one_step(twin, reference, seed=5)
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


@check()
def a_wrapper_is_one_of_the_wrapped_kind(seat: Seat) -> None:
    """isinstance() with the wrapped class holds, as with Horovod. Copies and pickles work as before."""
    model = make_model("small", 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model.named_parameters())
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert isinstance(one, torch.optim.AdamW)
        assert isinstance(one, hvd.DistributedOptimizer)
        assert not isinstance(one, torch.optim.SGD)
        assert type(one) is hvd.DistributedOptimizer
        assert repr(one).startswith("DistributedOptimizer(AllReduce")
    with pytest.raises(AttributeError, match="zero_gradd"):
        optimizer.zero_gradd()


@check(least=2)
def a_copy_averages_its_own_buffers(seat: Seat) -> None:
    """A copy averages the buffers of the copied model, not those of the original."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        sgd(model),
        model.named_parameters(),
        algorithm=LocalSGD(1, buffers="average"),
        named_buffers=model.named_buffers(),
    )
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    model[1].running_mean.fill_(seat.rank)
    copied(torch.ones(2, 4)).sum().backward()
    copied[1].running_mean.fill_(seat.rank)
    its_optimizer.step()
    assert torch.equal(copied[1].running_mean, torch.full((3,), (seat.size - 1) / 2))
    assert torch.equal(model[1].running_mean, torch.full((3,), float(seat.rank)))
