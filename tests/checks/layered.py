"""Layered SGD: AllReduce's parameters, steps that are completed by whoever looks, and nothing that waits before."""

from __future__ import annotations

import copy
import math
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import sordino.torch as hvd
from checks.local_sgd import OPTIMIZERS, Make, Odd, batch, divisors, near, step, train, wrap
from checks.registry import Seat, check
from sordino.algorithms import AllReduce, Layered
from sordino.context import current, use
from sordino.errors import UsageError
from sordino.torch.segments import StepOrderError

LONG: dict[str, Make] = {  # that do not diverge in 50 steps
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.002, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
}
EVERYWHERE = ("", "one", "pairs")
"""Communicators that are threads, and that are ranks."""


def layered(group_size: int, **settings: Any) -> Layered:
    """With the communicators that this world has, and then with its groups."""
    layers = current().layers
    if layers is not None:
        return Layered(layers.algorithm.group_size, "rank", **settings)
    return Layered(group_size, **settings)


@check(least=2, communicators=EVERYWHERE, name=tuple(LONG))
def layers_change_nothing(seat: Seat, name: str) -> None:
    wanted = train(seat, AllReduce(), 50, LONG[name])
    dedicated = current().layers is not None
    for k in [seat.size] if dedicated else divisors(seat.size):
        algorithm = layered(k, segment_bytes=300)
        found = train(seat, algorithm, 50, LONG[name])
        near(found, wanted)
        if algorithm.group_size == seat.size:
            equal(found, wanted)
        seat.same("model", *found.parameters())


def postponed(optimizer: Any) -> bool:
    """Whether a step is still to be completed. Looks at nothing that would complete it."""
    return optimizer._reducer._postponed is not None


def equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """To the last bit where a group of all workers adds up gradients in AllReduce's order: where they share memory."""
    near(one, other)
    if len(set(current().world.nodes)) == 1 and current().world.shares_memory:
        for mine, theirs in zip(one.parameters(), other.parameters()):
            assert torch.equal(mine, theirs)


READS: dict[str, Callable[[Odd, Any], Any]] = {
    "forward": lambda model, _: model(torch.ones(1, 13)),
    "state_dict": lambda model, _: model.state_dict(),
    "arithmetic": lambda model, _: model.first + 1,
    "a view": lambda model, _: model.first[2:3].sum(),
    "data": lambda model, _: model.first.data,
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


@check(least=2, communicators=("", "one"), stale=(False, True))
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


@check(least=2, communicators=EVERYWHERE)
def nothing_waits_before_the_first_use(seat: Seat) -> None:
    """While a rank is late with its step, the others load their batches."""
    model = Odd()
    optimizer = wrap(model, layered(divisors(seat.size)[-2]))
    step(seat, model, optimizer, 0)
    model.state_dict()
    inputs, targets = batch(seat.rank, 1)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    if seat.rank == 0:
        seat.meet("others", range(1, seat.size))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if seat.rank > 0:
        seat.meet("others", [seat.rank])
    seat.same("model", *model.parameters())


@check(least=2)
def rates_are_those_of_the_step(seat: Seat) -> None:
    models = []
    for algorithm in (Layered(seat.size), AllReduce()):
        model = Odd()
        optimizer = wrap(model, algorithm)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for turn in range(5):
            step(seat, model, optimizer, turn)
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5 ** (turn + 1))
        models.append(model)
    equal(*models)


@check(least=2, passes=(1, 2), set_to_none=(True, False))
def gradients_are_cleared_after_their_use(seat: Seat, passes: int, set_to_none: bool) -> None:
    models = []
    for algorithm in (layered(seat.size), AllReduce()):
        model = Odd()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](list(model.parameters())),
            model.named_parameters(),
            backward_passes_per_step=passes,
            algorithm=algorithm,
        )
        for turn in range(4):
            for part in range(passes):
                inputs, targets = batch(seat.rank, passes * turn + part)
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        model.state_dict()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        models.append(model)
    equal(*models)


@check(least=2, communicators=("", "one"))
def the_last_step_is_not_lost(seat: Seat) -> None:
    model, plain = Odd(), Odd()
    optimizer, wanted = wrap(model, layered(seat.size)), wrap(plain, AllReduce())
    for turn in range(3):
        step(seat, model, optimizer, turn)
        step(seat, plain, wanted, turn)
    state = copy.deepcopy(optimizer.state_dict())
    twin = Odd()
    twin.load_state_dict(model.state_dict())
    resumed = wrap(twin, layered(seat.size))
    resumed.load_state_dict(state)
    with pytest.raises(ZeroDivisionError):
        step(seat, model, optimizer, 3)
        raise ZeroDivisionError
    step(seat, twin, resumed, 3)
    step(seat, plain, wanted, 3)
    equal(model, plain)
    equal(twin, plain)
    # Nor by whoever leaves before anybody has looked.
    step(seat, model, optimizer, 4)
    step(seat, plain, wanted, 4)
    reducer = optimizer._reducer
    current().shutdown()
    assert reducer._postponed is None
    equal(model, plain)


@check(least=2)
def steps_are_taken_where_they_were_called(seat: Seat) -> None:
    """Whatever the first use is in."""
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


@check(least=2, communicators=("", "one"))
def scalers_decide_alike(seat: Seat) -> None:
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = wrap(model, layered(seat.size), lambda p: torch.optim.SGD(p, lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for infinite in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 8)).sum()).backward(retain_graph=True)
        if infinite:
            inputs = torch.full((1, 8), torch.inf if seat.rank == 0 else 1.0)
            optimizer.synchronize()
            optimizer.zero_grad()
            scaler.scale(model(inputs).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seat.same("scale", scaler.get_scale())
    assert scaler.get_scale() == 2.0
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 8), -1.0))


def train_unequally(seat: Seat, algorithm: Any) -> tuple[Odd, int]:
    """Rank r takes r steps; the last batch is shorter."""
    model = Odd()
    optimizer = wrap(model, algorithm)
    for turn in range(seat.rank):
        inputs, targets = batch(seat.rank, turn)
        rows = 2 if turn == seat.rank - 1 else 6
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[:rows]), targets[:rows]).backward()
        optimizer.step()
        hvd.allreduce(torch.ones(1), name="of those who train")
    return model, hvd.join()


@check(least=2, communicators=EVERYWHERE)
def those_who_joined_stand_in_for_zeros(seat: Seat) -> None:
    wanted, last = train_unequally(seat, AllReduce())
    for k in divisors(seat.size):
        found, joined = train_unequally(seat, layered(k))
        assert joined == last == seat.last
        near(found, wanted)
    seat.same("later", hvd.allreduce(torch.arange(3.0)))


class Counting(torch.optim.SGD):
    """An optimizer that keeps a number of its own among the hyper-parameters, as some do."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.05)
        self.param_groups[0]["count"] = 0

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["count"] += 1
        self.param_groups[0]["rates"] = (*self.param_groups[0].get("rates", ()), self.param_groups[0]["lr"])
        super().step()


@check(least=2)
def optimizers_keep_what_they_change(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, Layered(seat.size), Counting)
    for turn in range(3):
        step(seat, model, optimizer, turn)
        optimizer.param_groups[0]["lr"] = 0.01 * (turn + 1)
    model.state_dict()
    assert optimizer.param_groups[0]["count"] == 3
    assert optimizer.param_groups[0]["rates"] == (0.05, 0.01, 0.02)
    assert optimizer.param_groups[0]["lr"] == 0.03


@check(least=2)
def two_optimizers_are_postponed_at_once(seat: Seat) -> None:
    models = []
    for algorithm in (Layered(seat.size), AllReduce()):
        pair = [Odd(), Odd()]
        optimizers = [wrap(model, algorithm) for model in pair]
        for turn in range(3):
            for k in (0, 1) if turn % 2 else (1, 0):
                step(seat, pair[k], optimizers[k], turn + k)
        if isinstance(algorithm, Layered):
            assert all(map(postponed, optimizers))
        models.append(pair)
    for mine, theirs in zip(*models):
        equal(mine, theirs)


@check(least=2, on=("mpi",))
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
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@check(least=2)
def modes_of_users_end_as_they_began(seat: Seat) -> None:
    """The watch lies below them, and leaves nothing on the stack."""
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


@check(least=2, on=("mpi",))  # the default device is the process's
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


@check(least=2, on=("mpi",))  # the compiler is for one thread
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
    torch.autograd.backward(third)  # and adds to the gradient
    assert not postponed(optimizer)
    optimizer.step()
    assert weight.tolist() == [-4.0] * 3


@check(least=2)
def impossible_layers_are_refused(seat: Seat) -> None:
    for field, value in (("group_size", 0), ("segment_bytes", 0), ("check_stale", 2), ("communicator", "leader")):
        with pytest.raises(UsageError, match=field):
            Layered(**{field: value})
    with pytest.raises(UsageError, match="cannot be cut into groups"):
        wrap(Odd(), Layered(seat.size + 1))
    with pytest.raises(UsageError, match=r"hvd\.init\(layered="):
        wrap(Odd(), Layered(1, "rank"))
    for option, text in (
        ({"op": hvd.Sum}, "averages"),
        ({"compression": hvd.Compression.fp16}, "compression"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
    ):
        model = Odd()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match=text):
            hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=Layered(seat.size), **option)


@check(least=2, communicators=("one", "pairs"))
def ranks_count_workers_only(seat: Seat) -> None:
    layers = current().layers
    assert hvd.size() == layers.context.size - len(layers.roles.communicators)
    assert layers.roles.workers[hvd.rank()] == layers.context.rank
    with pytest.raises(UsageError, match=r"hvd\.init\(layered="):
        wrap(Odd(), Layered(layers.algorithm.group_size + 1, "rank"))
    if seat.size > 2:
        some = hvd.add_process_set([0, 1])
        if seat.rank < 2:
            with pytest.raises(UsageError, match="process_set"):
                model = Odd()
                sgd = torch.optim.SGD(model.parameters(), lr=0.1)
                hvd.DistributedOptimizer(sgd, algorithm=layered(1), process_set=some)
        hvd.barrier()


@check(least=2, communicators=("one", "pairs"))
def plans_grow_with_communicators(seat: Seat) -> None:
    models = []
    for algorithm in (layered(1), AllReduce()):
        model = Odd()
        model.wide.requires_grad_(False)
        optimizer = wrap(model, algorithm)
        for turn in range(6):
            if turn == 2:
                model.wide.requires_grad_(True)
            if turn == 4:
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
            step(seat, model, optimizer, turn)
        models.append(model)
    near(*models)
