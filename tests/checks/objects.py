"""Objects, parameters and optimizer state that are sent from one rank to the others."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.models import MANY, make_model, one_step
from checks.reference import DTYPES, assert_equal, values
from checks.registry import Seat, check
from sordino.errors import OperationMismatch, UsageError

OBJECTS = {
    "none": None,
    "nested": {"a": [1, 2.5, (None, True)], 3: {"x": b"bytes"}, ("tuple",): {1, 2}},
    "text": "ä" * 1000,
    "tensor": torch.arange(5),
    "large": list(range(50_000)),
    "function": lambda x: x + 41,
}


@check(what=OBJECTS)
def broadcast_object(seat: Seat, what: str) -> None:
    for root in range(seat.size):
        mine = OBJECTS[what] if seat.rank == root else ["something", "else", seat.rank]
        got = hvd.broadcast_object(mine, root_rank=root)
        assert (got is mine) == (seat.rank == root)
        if what == "function":
            assert got(1) == 42
        elif what == "tensor":
            assert torch.equal(got, OBJECTS[what])
        else:
            assert got == OBJECTS[what]
    assert hvd.broadcast_object(seat.rank, seat.last, name="named") == seat.last


@check()
def allgather_object(seat: Seat) -> None:
    """Each rank's object has another size; every rank gets copies."""
    mine = {"rank": seat.rank, "data": "x" * (seat.rank * 3000)}
    for name in (None, "named"):
        got = hvd.allgather_object(mine, name=name)
        assert got == [{"rank": rank, "data": "x" * (rank * 3000)} for rank in range(seat.size)]
        assert got[seat.rank] is not mine
    assert hvd.allgather_object(None) == [None] * seat.size


@check(dtype=DTYPES)
def broadcast_parameters_of_any_dtype(seat: Seat, dtype: torch.dtype) -> None:
    for root in (0, seat.last):
        tensors = {
            f"t{i}": values(seat.rank, shape, dtype, wide=True) for i, shape in enumerate([(), (0,), (5, 3), (900,)])
        }
        hvd.broadcast_parameters(tensors, root_rank=root)
        for i, shape in enumerate([(), (0,), (5, 3), (900,)]):
            assert_equal(tensors[f"t{i}"], values(root, shape, dtype, wide=True))


@check()
def broadcast_parameters_forms(seat: Seat) -> None:
    def fresh() -> torch.nn.Module:
        return make_model("conv", seed=seat.rank)

    wanted = make_model("conv", seed=seat.last).state_dict()
    for form in (
        lambda model: model.state_dict(),
        lambda model: model.named_parameters(),
        lambda model: list(model.parameters()),
        lambda model: model.parameters(),
        lambda model: OrderedDict(reversed(list(model.state_dict().items()))),
    ):
        model = fresh()
        hvd.broadcast_parameters(form(model), root_rank=seat.last)
        for name, parameter in model.named_parameters():
            assert_equal(parameter, wanted[name])
            assert parameter.requires_grad and parameter.is_leaf
    state = {**fresh().state_dict(), "extra": None, "count": 3}
    hvd.broadcast_parameters(state, root_rank=0)
    assert state["extra"] is None and state["count"] == 3
    raises(UsageError, "int", hvd.broadcast_parameters, 5, 0)
    raises(UsageError, "params", hvd.broadcast_parameters, "weights", 0)
    raises(UsageError, "not a tensor", hvd.broadcast_parameters, [1, 2], 0)


@check(least=2)
def broadcast_parameters_of_different_models(seat: Seat) -> None:
    mine = {"b": torch.ones(2), "w": torch.ones(3 + (seat.rank == seat.last)), "x": torch.ones(2)}
    raises(OperationMismatch, "w", hvd.broadcast_parameters, mine, 0)
    hvd.barrier()
    hvd.broadcast_parameters({name: mine[name] for name in ("b", "x")}, 0)


@check()
def two_parameters_of_one_name_are_refused(seat: Seat) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="two tensors have the name 'weight'"):
        hvd.broadcast_parameters([*model.named_parameters(), *torch.nn.Linear(2, 2).named_parameters()], 0)
    hvd.broadcast_parameters(model.named_parameters(), 0)


@check(least=2)
def state_has_the_memory_format_of_its_parameter(seat: Seat) -> None:
    """Fused optimizers read parameters and state in memory order."""

    def gradient(seed: int) -> torch.Tensor:
        return values(seed, (2, 3, 4, 4), torch.float32).to(memory_format=torch.channels_last)

    for wrapped in (False, True):
        parameter = torch.nn.Parameter(gradient(0))
        optimizer: torch.optim.Optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
        if seat.rank == 0:
            parameter.grad = gradient(1)
            optimizer.step()
        hvd.broadcast_parameters([("parameter", parameter)], 0)
        if wrapped:
            hvd.broadcast_optimizer_state(optimizer, 0)
            optimizer = hvd.DistributedOptimizer(optimizer)
            state = optimizer.state_dict()
            state["state"][0]["momentum_buffer"] = state["state"][0]["momentum_buffer"].contiguous()
            optimizer.load_state_dict(state)
        else:
            hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.state[parameter]["momentum_buffer"].stride() == parameter.stride()
        parameter.grad = gradient(2)
        optimizer.step()
        seat.same("parameter", parameter)


@check(label=MANY)
def broadcast_optimizer_state(seat: Seat, label: str) -> None:
    """Only the root has state. Afterwards all ranks have it, with the root's options and their types, and train
    equally."""
    model = make_model("small", seed=0)
    optimizer = MANY[label](model)
    if seat.rank == seat.last:
        for turn in range(2):
            one_step(model, optimizer, seed=turn)
        for group in optimizer.param_groups:
            group["lr"] = 0.0625
    else:
        for group in optimizer.param_groups:
            group["lr"] = 1.0 + seat.rank
    hvd.broadcast_parameters(model.state_dict(), root_rank=seat.last)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    hvd.broadcast_optimizer_state(optimizer, root_rank=seat.last)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), "broadcasting state must not change weights"
    wanted = make_model("small", seed=0)
    reference = MANY[label](wanted)
    for turn in range(2):
        one_step(wanted, reference, seed=turn)
    for group in reference.param_groups:
        group["lr"] = 0.0625
    state, other = optimizer.state_dict(), reference.state_dict()
    assert state["state"].keys() == other["state"].keys()
    for mine, theirs in zip(state["param_groups"], other["param_groups"]):
        assert mine == theirs
        assert {key: type(value) for key, value in mine.items()} == {key: type(value) for key, value in theirs.items()}
    for key, entry in state["state"].items():
        for name, value in entry.items():
            assert type(value) is type(other["state"][key][name]), name
            if isinstance(value, torch.Tensor):
                assert_equal(value, other["state"][key][name])
            else:
                assert value == other["state"][key][name]
    one_step(model, optimizer, seed=7)
    one_step(wanted, reference, seed=7)
    for mine, theirs in zip(model.parameters(), wanted.parameters()):
        assert_equal(mine, theirs)
        seat.same("trained on", mine)


@check()
def broadcast_of_a_wrapped_optimizers_state(seat: Seat) -> None:
    model = make_model("small", seed=seat.rank)
    plain = torch.optim.SGD(model.parameters(), lr=0.1 * (seat.rank + 1), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    one_step(model, optimizer, seed=seat.rank)
    for parameter in model.parameters():
        seat.same("parameter", parameter)
        seat.same("momentum", plain.state[parameter]["momentum_buffer"])


@check()
def hyper_parameters_that_are_tensors_are_broadcast(seat: Seat) -> None:
    rate = torch.tensor(0.1 * (seat.rank + 1), dtype=torch.float64)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=rate)
    optimizer.param_groups[0]["both"] = (rate + 1, "text")
    hvd.broadcast_optimizer_state(optimizer, 0)
    (both, text) = optimizer.param_groups[0]["both"]
    assert float(optimizer.param_groups[0]["lr"]) == 0.1 and float(both) == 1.1 and text == "text"


@check()
def lbfgs_state_is_refused(seat: Seat) -> None:
    raises(
        ValueError, "LBFGS", hvd.broadcast_optimizer_state, torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]), 0
    )


@check(least=2)
def a_tensor_that_cannot_be_sent_leaves_nothing_behind(seat: Seat) -> None:
    """All tensors are checked before the first is sent, so no name stays taken and no rank waits."""
    model = torch.nn.Linear(2, 2)
    for broken in (torch.zeros(2, dtype=torch.complex64), torch.zeros(2).to_sparse()):
        state = {"a": model.weight.detach(), "b": model.bias.detach(), "z": broken}
        with pytest.raises(UsageError, match="broadcast_parameters: z: "):
            hvd.broadcast_parameters(state, 0)
    hvd.broadcast_parameters({"a": model.weight.detach(), "b": model.bias.detach()}, 0)
    seat.same("weight", model.weight)


@check(least=3)
def broadcasts_in_a_process_set(seat: Seat) -> None:
    """The root is not the first rank of the set; ranks outside the set take no part."""
    some = hvd.add_process_set(range(1, seat.size))
    model = make_model("small", seat.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + seat.rank, momentum=0.9)
    one_step(model, optimizer, seat.rank)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    wanted = make_model("small", seat.last)
    one_step(wanted, torch.optim.SGD(wanted.parameters(), lr=0.1 + seat.last, momentum=0.9), seat.last)
    if seat.rank > 0:
        hvd.broadcast_parameters(model.state_dict(), seat.last, process_set=some)
        hvd.broadcast_optimizer_state(optimizer, seat.last, process_set=some)
        assert optimizer.param_groups[0]["lr"] == 0.1 + seat.last
        for mine, theirs in zip(model.parameters(), wanted.parameters()):
            assert torch.equal(mine, theirs)
    else:
        assert all(torch.equal(mine, then) for mine, then in zip(model.parameters(), before))
    hvd.remove_process_set(some)


class Remembering(torch.nn.Module):
    """Module that keeps extra state in addition to its parameters: an object or a tensor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), float(rank)))
        self.kept: object = {"rank": rank}

    def get_extra_state(self) -> object:
        return self.kept

    def set_extra_state(self, state: object) -> None:
        self.kept = state


@check()
def the_mean_of_models_with_extra_state(seat: Seat) -> None:
    model = torch.nn.Sequential(Remembering(seat.rank), Remembering(seat.rank))
    model[1].kept = torch.full((3,), float(seat.rank))
    mean = hvd.average_parameters(model)
    assert mean["0._extra_state"] == {"rank": seat.rank}
    assert mean["1._extra_state"].tolist() == [float(seat.rank)] * 3
    assert mean["0.weight"].tolist() == [(seat.size - 1) / 2] * 2
    twin = torch.nn.Sequential(Remembering(0), Remembering(0))
    twin.load_state_dict(mean)
    mean["0._extra_state"]["rank"] = -1
    assert model[0].kept == {"rank": seat.rank}


@check()
def the_mean_of_complex_parameters(seat: Seat) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.full((2,), complex(seat.rank, 1)))
    model.register_buffer("phase", torch.tensor(1j * seat.rank))
    middle = (seat.size - 1) / 2
    mean = hvd.average_parameters(model)
    assert mean["weight"].tolist() == [complex(middle, 1)] * 2 and mean["phase"].item() == 1j * middle
    assert hvd.average_parameters(model, "local")["phase"].item() == 1j * seat.rank
    wanted = sum(abs(rank - middle) for rank in range(seat.size)) / seat.size * 2**0.5
    assert abs(hvd.consensus_distance(model) - wanted) < 1e-6
    assert model.weight.tolist() == [complex(seat.rank, 1)] * 2
