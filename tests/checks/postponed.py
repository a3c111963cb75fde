"""Postponed steps of Layered SGD: the first use of a parameter completes them, and nothing else differs."""

from __future__ import annotations

import copy
import math
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import sordino.torch as hvd
from checks.layered import equal, layered, postponed
from checks.odd import Odd, step, wrap
from checks.registry import Seat, check
from sordino.algorithms import AllReduce, Layered
from sordino.errors import StepOrderError
from sordino.runtime.context import current, use

READS: dict[str, Callable[[Odd, Any], Any]] = {
    "forward": lambda model, _: model(torch.ones(1, 13)),
    "state_dict": lambda model, _: model.state_dict(),
    "arithmetic": lambda model, _: model.first + 1,
    "a view": lambda model, _: model.first[2:3].sum(),
    "data": lambda model, _: model.first.data,
    "by keyword": lambda model, _: torch.add(torch.ones(7), other=model.bias),
    "grad": lambda model, _: model.first.grad,
    "norm": lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "a list": lambda model, _: torch._foreach_norm([p.float() for p in model.parameters()]),
    "copy": lambda model, _: copy.deepcopy(model),
    "numpy": lambda model, _: model.first.detach().numpy(),
    "average": lambda model, _: torch.optim.swa_utils.AveragedModel(model).update_parameters(model),
    "function": lambda model, _: torch.func.functional_call(model, dict(model.named_parameters()), torch.ones(1, 13)),
    "optimizer state": lambda _, optimizer: optimizer.state,
    "optimizer state_dict": lambda _, optimizer: optimizer.state_dict(),
    "optimizer copy": lambda _, optimizer: copy.deepcopy(optimizer),
    "synchronize": lambda _, optimizer: optimizer.synchronize(),
    "flush": lambda _, optimizer: optimizer.flush(),
    "write": lambda model, _: model.first.data.mul_(1.0),
    "load": lambda model, _: model.bias.copy_(model.bias.clone()),
    "consensus": lambda model, _: hvd.consensus_distance(model),
    "broadcast": lambda model, _: hvd.broadcast_parameters(model.state_dict(), root_rank=0),
    "all-reduce": lambda model, _: hvd.allreduce(model.first.data),
}


@check(least=2, helpers=("", "one"), stale=(False, True))
@torch.no_grad()
def whoever_looks_completes_the_step(seat: Seat, stale: bool) -> None:
    model, plain = Odd(), Odd()
    optimizer, wanted = wrap(model, layered(seat.size, check_stale=stale)), wrap(plain, AllReduce())
    for turn, (name, read) in enumerate(READS.items()):
        with torch.enable_grad():
            step(seat, model, optimizer, turn)
            step(seat, plain, wanted, turn)
        assert postponed(optimizer), name
        torch.ones(3).sum()
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
        assert postponed(optimizer), name
        read(model, optimizer)
        assert not postponed(optimizer), name
        equal(model, plain)


@check(least=2)
def steps_are_taken_where_they_were_called(seat: Seat) -> None:
    """A step is completed in the modes of its call (inference, autocast, gradients), whatever the modes of the first
    use."""
    model, plain = Odd(), Odd()
    optimizer, wanted = wrap(model, Layered(seat.size)), wrap(plain, AllReduce())
    surroundings: list[Any] = [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.no_grad()]
    for turn in range(5):
        step(seat, model, optimizer, turn)
        step(seat, plain, wanted, turn)
        with surroundings[turn % 3]:
            model(torch.ones(1, 13))
        assert not postponed(optimizer)
    equal(model, plain)
    functions = torch.func.grad(lambda values: torch.func.functional_call(model, values, torch.ones(1, 13)).sum())
    taken_out = {name: parameter.detach() for name, parameter in model.named_parameters()}
    step(seat, model, optimizer, 5)
    functions(taken_out)
    assert not postponed(optimizer)


@check(least=2)
def a_thread_that_ends_completes_its_step(seat: Seat) -> None:
    model, plain = Odd(), Odd()
    wanted = wrap(plain, AllReduce())
    context = current()

    def train_there() -> None:
        with use(context):
            optimizer = wrap(model, Layered(seat.size))
            for turn in range(2):
                step(seat, model, optimizer, turn)

    thread = threading.Thread(target=train_there)
    thread.start()
    thread.join()
    for turn in range(2):
        step(seat, plain, wanted, turn)
    equal(model, plain)


@check(least=2)
def readers_wait_for_who_completes(seat: Seat) -> None:
    model, plain = Odd(), Odd()
    optimizer, wanted = wrap(model, Layered(seat.size)), wrap(plain, AllReduce())
    for turn in range(5):
        step(seat, model, optimizer, turn)
        step(seat, plain, wanted, turn)
        threads = [threading.Thread(target=optimizer.flush) for _ in range(3)]
        for thread in threads:
            thread.start()
        model(torch.ones(1, 13))
        for thread in threads:
            thread.join()
        equal(model, plain)


@check(least=2)
def stale_reads_raise_if_asked_to(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, Layered(seat.size, check_stale=True))
    step(seat, model, optimizer, 0)
    taken_out = model.first.detach().numpy()
    step(seat, model, optimizer, 1)
    raised: list[BaseException] = []

    def read() -> None:
        for look in (model.first.sum, lambda: model(torch.ones(1, 13)), lambda: model.bias + 1, model.state_dict):
            try:
                look()
            except StepOrderError as error:
                raised.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert len(raised) == 4
    assert "optimizer.flush()" in str(raised[0])
    assert postponed(optimizer)
    assert all(math.isnan(value) for value in taken_out.flat)
    assert torch.isfinite(model.first).all()
    assert all(map(math.isfinite, taken_out.flat))
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


@check(least=2, on=("processes",))
def a_child_sees_the_completed_step(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, Layered(seat.size))
    step(seat, model, optimizer, 0)
    child = os.fork()
    if child == 0:
        os._exit(1 if postponed(optimizer) else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert not postponed(optimizer)


class Passing(TorchFunctionMode):
    """Mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@check(least=2)
def modes_of_users_end_as_they_began(seat: Seat) -> None:
    """The watch is below the user's modes, and leaves nothing on the stack."""
    model = Odd()
    optimizer = wrap(model, Layered(seat.size))
    step(seat, model, optimizer, 0)
    model.state_dict()
    model(torch.ones(1, 13))
    depth = torch._C._len_torch_function_stack()
    with torch.device("cpu"), Passing():
        step(seat, model, optimizer, 1)
        with torch.device("meta"):
            assert torch.empty(1).device.type == "meta"
        with Passing():
            assert torch._C._len_torch_function_stack() == depth + 4
        assert torch.empty(1).device.type == "cpu"
        assert torch._C._len_torch_function_stack() == depth + 3
    assert torch._C._len_torch_function_stack() == depth + 1
    assert postponed(optimizer)
    model(torch.ones(1, 13))
    assert not postponed(optimizer)
    assert torch._C._len_torch_function_stack() == depth
    step(seat, model, optimizer, 2)
    with Passing(), torch.device("cpu"):
        model(torch.ones(1, 13))
        assert torch._C._len_torch_function_stack() == depth + 2
    assert torch._C._len_torch_function_stack() == depth


@check(least=2, on=("processes",))  # the default device belongs to the process
def a_default_device_stays_at_the_bottom(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, Layered(seat.size))
    torch.set_default_device("cpu")
    try:
        step(seat, model, optimizer, 0)
        torch.set_default_device("meta")
        assert postponed(optimizer)
        assert torch.empty(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert torch.empty(1).device.type == "cpu"
    model(torch.ones(1, 13))
    assert not postponed(optimizer)


@check(least=2, on=("processes",))  # a compiler serves one thread only
def compiled_models_complete_the_step(seat: Seat) -> None:
    model, plain = Odd(), Odd()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer, wanted = wrap(model, Layered(seat.size)), wrap(plain, AllReduce())
    for turn in range(4):
        step(seat, compiled, optimizer, turn)
        step(seat, plain, wanted, turn)
        assert postponed(optimizer)
    result = torch.compile(lambda inputs: inputs @ model.first.T, backend="eager")(torch.ones(1, 13))
    assert torch.equal(result, torch.ones(1, 13) @ plain.first.T)
    equal(model, plain)


class Counting(torch.optim.SGD):
    """Optimizer that counts its steps in a tensor of each group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
        return super().step(closure)


@check(least=2)
def tensors_among_hyper_parameters(seat: Seat) -> None:
    """A step uses the learning rate at its call, even if a script changes it in place later. The optimizer's own
    changes stay."""
    value = torch.nn.Parameter(torch.zeros(3))
    count, rate = torch.zeros(()), torch.tensor(0.5)
    group = {"params": [value], "lr": rate, "count": count}
    optimizer = hvd.DistributedOptimizer(Counting([group], foreach=False), algorithm=Layered(group_size=1))
    for _ in range(4):
        value.grad = torch.ones_like(value)
        optimizer.step()
        rate.mul_(0.5)
    assert value.tolist() == [-0.9375] * 3
    assert optimizer.param_groups[0]["count"] is count and float(count) == 4
    assert optimizer.param_groups[0]["lr"] is rate


@check(least=2)
def backward_of_an_older_graph_completes_the_step(seat: Seat) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = wrap(torch.nn.ParameterList([weight]), Layered(seat.size), lambda p: torch.optim.SGD(p, lr=1.0))
    first, second, third = (weight.sum() for _ in range(3))
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert postponed(optimizer)
    second.backward()
    assert not postponed(optimizer)
    optimizer.step()
    torch.autograd.backward(third)  # this adds to the gradient
    assert not postponed(optimizer)
    optimizer.step()
    assert weight.tolist() == [-4.0] * 3
