"""Residuals of error feedback in checkpoints, and outer state that is kept when parameters are unfrozen or added."""

from __future__ import annotations

import copy
from typing import Any

import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.diloco import Layers, same_parameters, sgd, train
from checks.registry import Seat, check
from sordino.algorithms import Algorithm, AllReduce, Crossover, DiLoCo, LocalSGD, SparseLoCo
from sordino.checkpoint import share
from sordino.checkpoint.pieces import encoded, joined
from sordino.codecs import Codec, Int8, Sign, TopK, TwoBit
from sordino.errors import UsageError

Wrapped = tuple[torch.nn.Module, hvd.DistributedOptimizer]
SMALL = TopK(0.1, 32, contributors=True)
KINDS: dict[str, tuple[Algorithm, Codec | None]] = {
    "gradients": (AllReduce(), Sign(32)),
    "gradients-twobit": (AllReduce(), TwoBit(32)),
    "gradients-topk": (AllReduce(), TopK(0.1, 32)),
    "gradients-of-groups": (Crossover(group_size=2), Sign(32)),
    "diloco": (DiLoCo(interval=4, outer_momentum=0.9, fragments=2, compression=Sign(32)), None),
    "diloco-overlap": (DiLoCo(interval=4, outer_momentum=0.9, overlap=2, compression=TwoBit(32)), None),
    "sparse-loco": (SparseLoCo(interval=2, compression=SMALL), None),
    "local-sgd": (LocalSGD(2, compression=Sign(32)), None),
    "local-sgd-groups": (LocalSGD(2, 2, "allreduce", aggregate="gradients", compression=TwoBit(32)), None),
}
"""Algorithms, each with the codec of its gradients."""


def wrap(kind: str, seed: int = 1) -> Wrapped:
    algorithm, codec = KINDS[kind]
    model = Layers(seed, torch.float32)
    options = {} if codec is None else {"compression": codec}
    return model, hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm, **options)


def residuals_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a state that has the residuals of gradients or of an algorithm."""
    own = state["sordino"]
    found: dict[str, Any] = own["gradient_residuals"] if "gradient_residuals" in own else own.get("residuals", {})
    return found


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    (own,) = residuals_of(state)["by_rank"].values()
    return [residual for mean in own["means"] for residual in mean["residuals"]]


def has_residuals(state: dict[str, Any]) -> bool:
    return bool(residuals_of(state)) and any(bool(one.any()) for one in tensors_of(state))


def resumed(seat: Seat, kind: str, saved: tuple[Any, Any], turns: range) -> torch.nn.Module:
    """Return another model that has loaded the states, and trained on."""
    model, optimizer = wrap(kind, seed=9)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    train(seat, model, optimizer, turns)
    return model


@check(least=2, kind=tuple(KINDS))
def training_that_resumes(seat: Seat, kind: str) -> None:
    """Training is the same, bit for bit, if each rank resumes from its own state; without the residuals it is not."""
    if seat.size % KINDS[kind][0].workers_in_group or seat.size == KINDS[kind][0].workers_in_group == 2:
        return
    model, optimizer = wrap(kind)
    train(seat, model, optimizer, range(9))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert list(residuals_of(saved[1])["by_rank"]) == [seat.rank] and any(one.any() for one in tensors_of(saved[1]))
    train(seat, model, optimizer, range(9, 14))
    with seat.no_warnings():
        assert same_parameters(model, resumed(seat, kind, saved, range(9, 14)))
    residuals_of(saved[1]).clear()
    assert not same_parameters(model, resumed(seat, kind, saved, range(9, 14)))


@check(least=2, kind=("gradients", "diloco-overlap", "local-sgd"))
def a_state_that_is_loaded_twice(seat: Seat, kind: str) -> None:
    """A state can be loaded again after more training, and saved again before the next step."""
    model, optimizer = wrap(kind)
    train(seat, model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(seat, model, optimizer, range(5, 9))
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    for mine, then in zip(tensors_of(optimizer.state_dict()), tensors_of(saved[1])):
        assert torch.equal(mine, then)
    model.load_state_dict(saved[0])
    train(seat, model, optimizer, range(5, 9))
    assert all(map(torch.equal, wanted, model.parameters()))


@check(least=2, kind=("gradients", "local-sgd"))
def shards_of_all_ranks_have_all_residuals(seat: Seat, kind: str) -> None:
    """`checkpoint.share` divides what all ranks have. Each rank finds its own residuals in the joined state."""
    model, optimizer = wrap(kind)
    train(seat, model, optimizer, range(6))  # the end of an interval, so that all models are equal
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    momenta = {key: value["momentum_buffer"] for key, value in saved[1]["state"].items()}
    own = {key: value for key, value in saved[1].items() if key != "state"}  # momenta differ by rank with local SGD
    shard = encoded(share({"model": saved[0], "optimizer": own}, seat.rank, seat.size))
    whole = joined(hvd.allgather_object(shard, name="shards"), "state")
    assert list(residuals_of(whole["optimizer"])["by_rank"]) == list(range(seat.size))
    train(seat, model, optimizer, range(6, 10))
    state = {**whole["optimizer"], "state": {key: {"momentum_buffer": value} for key, value in momenta.items()}}
    assert same_parameters(model, resumed(seat, kind, (whole["model"], state), range(6, 10)))


@check(least=2, kind=("gradients", "diloco", "local-sgd"))
def a_synchronized_state_keeps_what_each_rank_owes(seat: Seat, kind: str) -> None:
    """In hvd.elastic each rank keeps its residuals; of the other state, all ranks take the first rank's."""
    wanted, plain = wrap(kind)
    train(seat, wanted, plain, range(7))
    model, optimizer = wrap(kind)
    train(seat, model, optimizer, range(5))
    before = [one.clone() for one in tensors_of(optimizer.state_dict())]
    state = hvd.elastic.TorchState(model, optimizer)
    state.sync()
    assert all(map(torch.equal, tensors_of(optimizer.state_dict()), before))
    train(seat, model, optimizer, range(5, 7))
    state.restore()  # to the synchronized state, which is not the first rank's either
    assert all(map(torch.equal, tensors_of(optimizer.state_dict()), before))
    train(seat, model, optimizer, range(5, 7))
    # With the other kinds each rank has its own model, which sync() replaces by the first rank's.
    assert kind != "gradients" or same_parameters(model, wanted)


@check(least=2, kind=("gradients", "diloco", "local-sgd"))
def all_ranks_load_the_state_of_the_first(seat: Seat, kind: str) -> None:
    """The first keeps its residuals. The others start from 0 and warn, unless the state has no residuals."""
    model, optimizer = wrap(kind)
    fresh = copy.deepcopy(optimizer.state_dict())
    train(seat, model, optimizer, range(6))
    first = hvd.broadcast_object(copy.deepcopy(optimizer.state_dict()), 0, name="first")
    with seat.warned(f"not those of rank {seat.rank}", when=seat.rank > 0):
        optimizer.load_state_dict(first)
    now = optimizer.state_dict()
    if seat.rank == 0:
        assert all(map(torch.equal, tensors_of(now), tensors_of(first)))
    else:
        assert not has_residuals(now)
    train(seat, model, optimizer, range(6, 8))
    optimizer.load_state_dict(fresh)
    assert not has_residuals(optimizer.state_dict())


@check(least=2, codec=("Sign(block=32)", "PowerSGD(rank=1)"))
def another_codec_sends_what_is_owed(seat: Seat, codec: str) -> None:
    """Another codec sends the residuals. A codec without error feedback drops them, with a warning."""
    parameter = torch.nn.Parameter(torch.zeros(10, 10))
    gradients = [torch.randn(10, 10, generator=torch.Generator().manual_seed(rank)) for rank in range(seat.size)]

    def wrapped(**options: Any) -> hvd.DistributedOptimizer:
        return hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("w", parameter)], **options)

    def steps(optimizer: hvd.DistributedOptimizer, count: int) -> None:
        for _ in range(count):
            parameter.grad = gradients[seat.rank].clone()
            optimizer.step()

    optimizer = wrapped(compression=codec)
    steps(optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    del optimizer
    optimizer = wrapped(compression=codec)
    optimizer.load_state_dict(state)
    steps(optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    del optimizer
    exact = wrapped(compression=TopK(1.0, 32, 32))
    exact.load_state_dict(copy.deepcopy(state))
    steps(exact, 1)
    wanted = -4 * torch.stack(gradients).double().mean(0)
    torch.testing.assert_close(parameter.detach().double(), wanted, atol=1e-5, rtol=1e-5)
    del exact
    for options in ({"compression": Int8(32)}, {}):
        other = wrapped(**options)
        with seat.warned("are dropped"):
            other.load_state_dict(copy.deepcopy(state))
        assert "sordino" not in other.state_dict()
        del other
    broken = wrapped(compression=codec)
    state["sordino"]["gradient_residuals"]["by_rank"][seat.rank]["means"][0]["residuals"] = []
    raises(UsageError, "no residuals of error feedback", broken.load_state_dict, state)
    broken.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


@check(least=2, codec=(Sign(32), TopK(0.1, 32)))
def added_parameters_leave_what_is_owed(seat: Seat, codec: Codec) -> None:
    """Gradients of a larger model are in other blocks, but earlier residuals are still sent."""
    parameter, added = torch.nn.Parameter(torch.zeros(100)), torch.nn.Parameter(torch.zeros(77))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("w", parameter)], compression=codec)
    wanted = torch.zeros(100, dtype=torch.float64)
    for turn in range(8):
        if turn == 4:
            optimizer.add_param_group({"params": [added]})
        generators = [torch.Generator().manual_seed(100 * turn + rank) for rank in range(seat.size)]
        gradients = [torch.randn(100, generator=one) for one in generators]
        parameter.grad, added.grad = gradients[seat.rank].clone(), torch.full((77,), float(seat.rank))
        optimizer.step()
        wanted -= torch.stack(gradients).double().mean(0)
    left = owed(seat, optimizer.state_dict())["w"]
    torch.testing.assert_close(parameter.detach().double() - left, wanted, atol=1e-4, rtol=1e-4)
    assert left.abs().max() > 0.1


def owed(seat: Seat, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return by parameter what the residuals of all ranks add to the mean. Collective."""
    (own,) = residuals_of(state)["by_rank"].values()
    found: dict[str, torch.Tensor] = {}
    for mean in own["means"]:
        total, *shard = (one.double() for one in mean["residuals"])
        total = hvd.allreduce(total, name="own")
        if shard:
            total += hvd.allgather(shard[0], name="of means")
        for name, begin, end, at, _ in mean["pieces"]:
            assert begin == 0
            found[name] = total[at : at + end]
    return found


def owed_on_average(optimizer: hvd.DistributedOptimizer) -> dict[str, torch.Tensor]:
    """Return by parameter what residuals of gradients add to the mean of the models of all groups. Collective."""
    (own,) = residuals_of(optimizer.state_dict())["by_rank"].values()
    found: dict[str, torch.Tensor] = {}
    for mean in own["means"]:
        total, *shard = (one.double() for one in mean["residuals"])
        begin = own["ranks"].index(hvd.rank())
        for one in shard:  # of the mean of a group, so each member owes it
            total[begin * len(one) : (begin + 1) * len(one)] += len(own["ranks"]) * one
        total = hvd.allreduce(total, name="owed")
        for name, begin, end, at, _ in mean["pieces"]:
            found[name] = total[at : at + end - begin]
    return found


@check(least=2, codec=("Sign(block=32)", "TwoBit(block=32)", "TopK(ratio=0.1, chunk=32, bits=32)", "PowerSGD(rank=1)"))
def gradients_that_no_rank_has_computed(seat: Seat, codec: str) -> None:
    """A parameter that no rank has used gets no gradient, and its residuals wait until some rank uses it."""
    parameters = {name: torch.nn.Parameter(torch.zeros(15, 20)) for name in ("always", "sometimes")}
    sgd = torch.optim.SGD(parameters.values(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, parameters.items(), compression=codec)
    wanted = {name: torch.zeros(15, 20, dtype=torch.float64) for name in parameters}
    for turn in range(10):
        for number, (name, parameter) in enumerate(parameters.items()):
            used = [name == "always" or (turn % 3 == 0 and rank != 1) for rank in range(seat.size)]
            generators = [torch.Generator().manual_seed(1000 * turn + 10 * rank + number) for rank in range(seat.size)]
            gradients = [torch.randn(15, 20, generator=one) * use for one, use in zip(generators, used)]
            wanted[name] -= torch.stack(gradients).double().mean(0)
            parameter.grad = gradients[seat.rank].clone() if used[seat.rank] else None
        before = parameters["sometimes"].detach().clone()
        optimizer.step()
        assert turn % 3 == 0 or torch.equal(parameters["sometimes"], before)
    for name, left in owed_on_average(optimizer).items():
        found = parameters[name].detach().double() - left.view(15, 20)
        torch.testing.assert_close(found, wanted[name], atol=1e-4, rtol=1e-4)
        assert left.abs().max() > 0.1


@check(least=4, codec=(Sign(32), TopK(0.1, 32)), when=("separate", "unfrozen"))
def groups_send_what_is_owed(seat: Seat, codec: Codec, when: str) -> None:
    """Residuals are sent when groups begin to train separately, and when a parameter is unfrozen."""
    if seat.size % 2:
        return
    model = Two()
    model.late.requires_grad_(False)
    algorithm = LocalSGD(100, 2, "allreduce", start=5 if when == "separate" else 0)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm=algorithm, compression=codec)
    wanted = -two_steps(seat, model, optimizer, range(5))
    model.late.requires_grad_(when == "unfrozen")
    wanted -= two_steps(seat, model, optimizer, range(5, 6))
    left = owed_on_average(optimizer)["weight"]
    found = hvd.allreduce(model.weight.detach().double(), name="found")
    torch.testing.assert_close(found - left, wanted, atol=1e-4, rtol=1e-4)
    assert left.abs().max() > 0.1


# ---- parameters that are unfrozen or added ---------------------------------------------------------------------------


class Two(torch.nn.Module):
    """Two weights whose gradients do not depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.weight = (torch.nn.Parameter(torch.zeros(40)) for _ in range(2))


def two_steps(seat: Seat, model: Two, optimizer: hvd.DistributedOptimizer, turns: range) -> torch.Tensor:
    """Take steps with given gradients; return the sum of the mean gradients of the weight."""
    total = torch.zeros(40, dtype=torch.float64)
    for turn in turns:
        generators = [torch.Generator().manual_seed(100 * turn + rank) for rank in range(seat.size)]
        gradients = [torch.randn(40, generator=one) for one in generators]
        model.weight.grad = gradients[seat.rank].clone()
        model.late.grad = torch.full((40,), seat.rank + 1.0) if model.late.requires_grad else None
        optimizer.step()
        total += torch.stack(gradients).double().mean(0)
    return total


@check(least=2, how=("unfrozen", "added"), overlap=(0, 1))
def parameters_of_diloco_that_come_later(seat: Seat, how: str, overlap: int) -> None:
    """Parameters come in the middle of an interval. The others train as before, with their outer momentum."""
    algorithm = DiLoCo(interval=4, outer_lr=0.7, outer_momentum=0.9, overlap=overlap)
    models, optimizers = [Two(), Two()], []
    for number, model in enumerate(models):
        model.late.requires_grad_(False)
        parameters = [model.weight] if how == "added" or number == 1 else [model.late, model.weight]
        names = [(name, one) for name, one in model.named_parameters() if any(one is mine for mine in parameters)]
        optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), names, algorithm=algorithm))
    for model, optimizer in zip(models, optimizers):
        two_steps(seat, model, optimizer, range(6))
    models[0].late.requires_grad_(True)
    if how == "added":
        optimizers[0].add_param_group({"params": [models[0].late]})
    for model, optimizer in zip(models, optimizers):
        two_steps(seat, model, optimizer, range(6, 13))
    torch.testing.assert_close(models[0].weight, models[1].weight, atol=1e-5, rtol=1e-5)
    with optimizers[0].outer_parameters():
        seat.same("outer", *models[0].parameters())
        assert models[0].late.abs().min() > 0.1


@check(least=2)
def fragments_of_diloco_when_a_block_is_unfrozen(seat: Seat) -> None:
    """Blocks move to other fragments, with their outer parameters. Ranks keep their own parameters."""
    model = Layers()
    model.layers[2].requires_grad_(False)
    algorithm = DiLoCo(interval=4, outer_lr=0.7, outer_momentum=0.9, fragments=2)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)
    train(seat, model, optimizer, range(6))
    with optimizer.outer_parameters():
        outer = [parameter.detach().clone() for parameter in model.parameters()]
    model.layers[2].requires_grad_(True)
    train(seat, model, optimizer, range(6, 7))
    with optimizer.outer_parameters():
        assert all(map(torch.equal, outer, model.parameters()))
    for layer in (model.layers[1], model.layers[2]):
        firsts = hvd.allgather(layer.weight.detach()[:1, :1], name="first weight")
        assert len(firsts.unique()) == seat.size, "a rank has lost its own steps"
    train(seat, model, optimizer, range(7, 12))
    with optimizer.outer_parameters():
        seat.same("outer", *model.parameters())


@check(least=2, codec=(Sign(32), TopK(0.1, 32)))
def residuals_of_diloco_when_a_parameter_is_unfrozen(seat: Seat, codec: Codec) -> None:
    """Residuals are sent later, although blocks and shards are cut anew."""
    model = Two()
    model.late.requires_grad_(False)
    algorithm = DiLoCo(interval=2, outer_lr=1.0, outer_momentum=0.0, compression=codec)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm=algorithm)
    wanted = -two_steps(seat, model, optimizer, range(5))
    model.late.requires_grad_(True)
    wanted -= two_steps(seat, model, optimizer, range(5, 10))
    left = owed(seat, optimizer.state_dict())["weight"]
    torch.testing.assert_close(model.weight.detach().double() + left, wanted, atol=1e-4, rtol=1e-4)
    assert left.abs().max() > 0.1


# ---- local SGD -------------------------------------------------------------------------------------------------------


@check(least=2)
def one_rank_loads_a_state_of_local_sgd(seat: Seat) -> None:
    """All ranks that average with it raise and change nothing. They continue once all ranks have loaded the state."""
    model, optimizer = wrap("local-sgd")
    train(seat, model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(seat, model, optimizer, range(3, 4))
    if seat.rank == 0:
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    turns = range(4, 6)  # the others notice at the end of the interval
    raises(UsageError, "rank 0 begins from a checkpoint", train, seat, model, optimizer, turns)
    for _ in range(2):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    train(seat, model, optimizer, range(3, 8))
    twin, other = wrap("local-sgd")
    train(seat, twin, other, range(8))
    assert same_parameters(model, twin)


@check(least=2)
def averages_of_local_sgd_in_flight_are_waited_for(seat: Seat) -> None:
    """Loading a state waits for them, as they hold names and memory."""
    model, optimizer = wrap("local-sgd")
    train(seat, model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    for fragment in optimizer._strategy._averaging._fragments:
        fragment.begin()
    optimizer.load_state_dict(saved)
    train(seat, model, optimizer, range(3, 8))
    twin, other = wrap("local-sgd")
    train(seat, twin, other, range(8))
    assert same_parameters(model, twin)
