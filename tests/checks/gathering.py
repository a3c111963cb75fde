"""Parameters that are gathered in the background: every use of one waits for its gather, and nothing else differs."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from checks.odd import OPTIMIZERS, Odd, batch, divisors, same_models, step, train, wrap
from checks.postponed import READS
from checks.registry import Seat, check
from sordino.algorithms import AdaptiveInterval, LocalSGD
from sordino.errors import PeerLost, UsageError
from sordino.runtime.context import current, use


def overlapped(seat: Seat, **settings: Any) -> LocalSGD:
    return LocalSGD(2, seat.size, bucket_bytes=400, overlap=True, **settings)


def under_way(optimizer: Any) -> list[str]:
    """Return the buckets that nothing has waited for yet, without waiting for any."""
    return optimizer._strategy._gathering.under_way


def pair(seat: Seat, turns: int = 2) -> tuple[Odd, Any, Odd]:
    """Return a model whose last gather is in flight, its optimizer, and the model that it must become."""
    model = Odd()
    optimizer = wrap(model, overlapped(seat))
    for turn in range(turns):
        step(seat, model, optimizer, turn)
    assert under_way(optimizer)
    return model, optimizer, train(seat, LocalSGD(2, seat.size, bucket_bytes=400), turns)


@check(least=2, name=tuple(OPTIMIZERS), aggregate=("parameters", "gradients"), start=("immediate", 3))
def an_overlapped_gather_changes_nothing(seat: Seat, name: str, aggregate: Any, start: Any) -> None:
    for k in divisors(seat.size)[1:]:
        settings: dict[str, Any] = {"aggregate": aggregate, "start": start, "bucket_bytes": 300, "log_distance": 2}
        wanted = train(seat, LocalSGD(3, k, **settings), 8, OPTIMIZERS[name])
        assert same_models(train(seat, LocalSGD(3, k, overlap=True, **settings), 8, OPTIMIZERS[name]), wanted)


@check(least=2)
def a_step_ends_before_others_begin_to_gather(seat: Seat) -> None:
    """While one rank is late with its step, the others load their batches; their next forward waits for it."""
    model = Odd()
    optimizer = wrap(model, overlapped(seat))
    step(seat, model, optimizer, 0)
    if seat.rank == seat.last:
        optimizer.register_step_pre_hook(lambda *_: seat.meet("others", range(seat.last)))
    step(seat, model, optimizer, 1)
    optimizer.zero_grad()
    if seat.rank != seat.last:
        seat.meet("others", [seat.rank])
    assert under_way(optimizer)
    model(batch(0, 0)[0])
    assert same_models(model, train(seat, LocalSGD(2, seat.size, bucket_bytes=400), 2))
    seat.same("model", *model.parameters())


@check(least=2, thread=(False, True))
def whoever_looks_waits(seat: Seat, thread: bool) -> None:
    """Every read of a parameter waits for its gather, in any thread."""
    reads = {name: read for name, read in READS.items() if not name.startswith(("optimizer", "synchronize", "grad"))}
    reads["pickle"] = lambda model, _: pickle.dumps(model.first)
    reads["to one's own"] = lambda model, _: setattr(model.first, "data", model.first.data.clone())
    if thread:  # these are collective
        reads = {name: read for name, read in reads.items() if name not in ("consensus", "broadcast", "all-reduce")}
    del reads["norm"]  # reads gradients
    model, plain = Odd(), Odd()
    optimizer, wanted = wrap(model, overlapped(seat)), wrap(plain, LocalSGD(2, seat.size, bucket_bytes=400))
    context = current()
    for turn, (name, read) in enumerate(reads.items()):
        step(seat, model, optimizer, turn)
        step(seat, plain, wanted, turn)
        before = under_way(optimizer)

        def look(read: Callable[[Odd, Any], Any] = read) -> None:
            with use(context), torch.no_grad():
                read(model, optimizer)

        if thread:
            other = threading.Thread(target=look)
            other.start()
            other.join()
        else:
            look()
        assert len(under_way(optimizer)) < len(before), name
        assert same_models(model, plain), name


@check(least=2)
def a_module_waits_for_its_own_parameters(seat: Seat) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(13, 13), torch.nn.Tanh(), torch.nn.Linear(13, 1))
    optimizer = wrap(model, LocalSGD(2, seat.size, bucket_bytes=1, overlap=True))
    seen: list[int] = []
    for module in (model[1], model[2]):
        module.register_forward_pre_hook(lambda *_: seen.append(len(under_way(optimizer))))
    for turn in range(4):
        if turn == 3:
            model.eval()  # in evaluation, a call of a module waits for all its parameters
        model(batch(seat.rank, 0)[0]).sum().backward()
        if turn == 0:
            seen.clear()
        optimizer.step()
        assert len(under_way(optimizer)) == 4
        optimizer.zero_grad()
    assert seen == [2, 0, 2, 0, 0, 0]


@check(least=2)
def what_uses_no_values_waits_for_nothing(seat: Seat) -> None:
    model, optimizer, _ = pair(seat)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step(seat, model, optimizer, 2)
    before = under_way(optimizer)
    optimizer.zero_grad()
    model.zero_grad()
    scheduler.step()
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    for parameter in model.parameters():
        assert parameter.grad is None
        assert parameter.requires_grad
        assert parameter.device.type == "cpu"
        assert parameter.dtype.is_floating_point
        assert parameter.is_leaf
        assert parameter.shape is not None
        assert isinstance(parameter, torch.nn.Parameter)
    assert under_way(optimizer) == before
    optimizer.flush()
    assert not under_way(optimizer)
    assert all(type(parameter) is torch.nn.Parameter and not vars(parameter) for parameter in model.parameters())
    assert same_models(model, train(seat, LocalSGD(2, seat.size, bucket_bytes=400), 3))


@check(least=2, how=("view", "numpy", "graph"))
def what_somebody_has_a_view_of_is_waited_for(seat: Seat, how: str) -> None:
    """A gather waits for the bucket of a parameter that has a view, as reads of a view cannot be seen."""
    model, optimizer, _ = pair(seat)
    total = len(under_way(optimizer))
    taken_out: Any = model.first.detach()[2:]
    if how == "numpy":
        taken_out = taken_out.numpy()
    elif how == "graph":
        taken_out = torch.nn.functional.linear(torch.ones(1, 13, requires_grad=True), model.first)
    step(seat, model, optimizer, 2)
    assert len(under_way(optimizer)) == total - 1
    plain = train(seat, LocalSGD(2, seat.size, bucket_bytes=400), 3)
    if how != "graph":
        assert torch.equal(torch.as_tensor(taken_out), plain.first.detach()[2:])
    assert len(under_way(optimizer)) == total - 1
    del taken_out
    step(seat, model, optimizer, 3)
    assert len(under_way(optimizer)) == total


def loss_of(seat: Seat, model: Odd, optimizer: Any, turn: int, scaler: Any = None) -> torch.Tensor:
    """Compute gradients and return the loss, as a closure does."""
    inputs, targets = batch(seat.rank, turn)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss


@check(least=2)
def an_overlapped_life_is_that_of_one_that_waits(seat: Seat) -> None:
    """Training with overlap is the same as without: clipping, closures, scalers, schedules, changes during the run,
    states and a second optimizer."""
    lives = []
    for overlap in (False, True):
        algorithm = LocalSGD(2, divisors(seat.size)[1], bucket_bytes=400, overlap=overlap)
        model, other, late = Odd(), Odd(), torch.nn.Parameter(torch.ones(9))
        model.image.requires_grad_(False)
        optimizer, second = wrap(model, algorithm), wrap(other, algorithm, OPTIMIZERS["adam"])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        states = []
        for turn in range(9):
            forward = partial(loss_of, seat, model, optimizer, turn)
            if turn == 0:
                optimizer.step(forward)
            elif turn == 1:
                forward(scaler)
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
            else:
                forward()
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
            scheduler.step()
            step(seat, other, second, turn)
            if turn == 3:
                model.image.requires_grad_(True)
            elif turn == 4:
                optimizer.add_param_group({"params": [late], "lr": 0.01})
            elif turn == 5:
                optimizer.set_backward_passes_per_step(1)
            elif turn == 6:
                states.append(copy.deepcopy(optimizer.state_dict()))
                states.append(hvd.average_parameters(model))
            elif turn == 7:
                optimizer.load_state_dict(states[0])
        lives.append((model, other, states))
    (model, other, states), (model_of_now, other_of_now, states_of_now) = lives
    assert same_models(model, model_of_now)
    assert same_models(other, other_of_now)
    for one, another in zip(states[1].values(), states_of_now[1].values()):
        assert torch.equal(one, another)
    for index, values in states[0]["state"].items():
        for key, value in values.items():
            found = states_of_now[0]["state"][index][key]
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(value))


@check(least=2)
def parameters_outlive_who_gathers_them(seat: Seat) -> None:
    """Parameters stay valid after their optimizer is dropped or replaced, and after the world ends."""
    model, optimizer, plain = pair(seat)
    del optimizer
    assert same_models(model, plain)
    model, optimizer, plain = pair(seat)
    gathering = optimizer._strategy._gathering
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert not gathering.under_way
    assert same_models(model, plain)
    model, optimizer, plain = pair(seat)
    current().shutdown()
    assert not under_way(optimizer)
    assert same_models(model, plain)


@check(least=2, on=("sim",))
def a_lost_peer_is_told_once_where_a_parameter_is_used(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, overlapped(seat))
    step(seat, model, optimizer, 0)

    def die(*_: Any) -> None:
        seat.meet("others", range(seat.last))
        current().abort("it is to die here")
        raise ZeroDivisionError

    if seat.rank == seat.last:
        optimizer.register_step_pre_hook(die)
        with pytest.raises(ZeroDivisionError):
            step(seat, model, optimizer, 1)
        return
    step(seat, model, optimizer, 1)
    assert len(under_way(optimizer)) > 1
    seat.meet("others", [seat.rank])
    with pytest.raises(PeerLost):
        model(batch(0, 0)[0])
    assert not under_way(optimizer)
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    assert torch.isfinite(model(batch(0, 0)[0])).all()


@check(least=2)
def many_threads_wait_for_one_gather(seat: Seat) -> None:
    model, optimizer, plain = pair(seat)
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(same_models(model, plain))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert same_models(model, plain)
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert not under_way(optimizer)


@check(least=2, on=("processes",))
def a_child_sees_gathered_parameters(seat: Seat) -> None:
    _, optimizer, _ = pair(seat)
    child = os.fork()
    if child == 0:
        os._exit(1 if under_way(optimizer) else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert not under_way(optimizer)


@check(least=2, on=("processes",))  # a compiler serves one thread only
def compiled_models_wait_for_all_of_theirs(seat: Seat) -> None:
    model, plain = torch.nn.Sequential(Odd()), torch.nn.Sequential(Odd())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = wrap(model, overlapped(seat))
    wanted = wrap(plain, LocalSGD(2, seat.size, bucket_bytes=400))
    for turn in range(4):
        step(seat, compiled, optimizer, turn)
        step(seat, plain, wanted, turn)
        assert under_way(optimizer)
    optimizer.zero_grad()  # a compiler reads gradients, too
    assert under_way(optimizer)
    result = torch.compile(lambda inputs: inputs @ model[0].first.T, backend="eager")(torch.ones(1, 13))
    assert torch.equal(result, torch.ones(1, 13) @ plain[0].first.T)
    assert same_models(model, plain)


@check(least=2)
def an_overlap_of_nothing_is_refused(seat: Seat) -> None:
    with pytest.raises(UsageError, match=r"overlap.*only with exchange='sharded'"):
        LocalSGD(exchange="allreduce", overlap=True)
    with pytest.raises(UsageError, match=r"overlap.*True or False"):
        LocalSGD(overlap=1)  # type: ignore[arg-type]
    model = Odd()
    optimizer = wrap(model, LocalSGD(2, 1, overlap=True, adaptive=AdaptiveInterval(2)))  # nothing is gathered
    step(seat, model, optimizer, 0)
    optimizer.report_metric(1.0)
