"""Shards of local SGD: the part that each rank has, the memory that this saves, and the same results as without."""

from __future__ import annotations

import copy

import pytest
import torch

import sordino.torch as hvd
from checks.odd import OPTIMIZERS, Odd, batch, divisors, near, step, train, wrap
from checks.registry import Seat, check
from sordino.algorithms import Algorithm, AllReduce, LocalSGD
from sordino.errors import UsageError


@check(least=2, name=tuple(OPTIMIZERS))
def shards_change_nothing(seat: Seat, name: str) -> None:
    for k in divisors(seat.size)[1:]:
        whole = train(seat, LocalSGD(3, k, "allreduce"), 8, OPTIMIZERS[name])
        near(train(seat, LocalSGD(3, k, "sharded", bucket_bytes=300), 8, OPTIMIZERS[name]), whole)


@check(worlds=("sim-4", "mpi-4", "mpi-4x2"))
def shards_send_less_across_and_keep_less_state(seat: Seat) -> None:
    # Operations of up to 64 KiB run in turns, which send their bytes again if a rank is late. All here are larger.
    groups, parameters = seat.size // 2, 64 * seat.size * 257
    groups_are_nodes = hvd.local_size() == 2 and hvd.cross_size() == groups
    sent, kept = {}, {}
    for exchange in ("sharded", "allreduce"):
        model = torch.nn.Linear(256, 64 * seat.size)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), model.named_parameters(), algorithm=LocalSGD(2, 2, exchange)
        )
        counts = []
        for _ in range(8):
            before = hvd.stats()
            optimizer.zero_grad()
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            counts.append({key: hvd.stats()[key] - before[key] for key in before if key.startswith("bytes_sent")})
        # Difference with and without averaging.
        sent[exchange] = {key: counts[-1][key] - counts[-2][key] for key in counts[-1]}
        states = optimizer.state.values()
        kept[exchange] = sum(t.numel() for state in states for t in state.values() if t.dim() > 0)
        if groups_are_nodes:
            assert sent[exchange]["bytes_sent_inside_node"] == 0
            assert counts[-2]["bytes_sent_across_nodes"] == 0
            assert counts[-2]["bytes_sent_inside_node"] > 0
            shard = 4 * parameters // (2 if exchange == "sharded" else 1)
            assert sent[exchange]["bytes_sent_across_nodes"] == 2 * (groups - 1) * shard // groups
    assert sent["allreduce"]["bytes_sent"] == 2 * sent["sharded"]["bytes_sent"] > 0, sent
    assert kept["allreduce"] == 2 * kept["sharded"] > 0


@check(least=2, name=tuple(OPTIMIZERS))
def a_state_is_that_of_whole_parameters(seat: Seat, name: str) -> None:
    """The state is that of an optimizer without shards. Training continues from it bit for bit, with or without
    shards."""
    models, states, optimizers = [], [], []
    for exchange in ("sharded", "allreduce"):
        model = Odd()
        optimizer = wrap(model, LocalSGD(2, seat.size, exchange, bucket_bytes=250), OPTIMIZERS[name])
        for turn in range(3):
            step(seat, model, optimizer, turn)
        models.append(model)
        optimizers.append(optimizer)
        states.append(optimizer.state_dict())
    sharded, whole = states
    assert sharded["param_groups"] == whole["param_groups"]
    assert sharded["state"].keys() == whole["state"].keys()
    for index, state in whole["state"].items():
        assert sharded["state"][index].keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(sharded["state"][index][key], value, atol=2e-6, rtol=2e-5)
    plain = Odd()
    plain.load_state_dict(models[0].state_dict())
    OPTIMIZERS[name](list(plain.parameters())).load_state_dict({k: v for k, v in sharded.items() if k != "sordino"})
    resumed = wrap(plain, LocalSGD(2, seat.size, bucket_bytes=400), OPTIMIZERS[name])
    resumed.load_state_dict(sharded)
    for turn in range(3, 6):
        step(seat, models[0], optimizers[0], turn)
        step(seat, plain, resumed, turn)
    for mine, theirs in zip(models[0].parameters(), plain.parameters()):
        assert torch.equal(mine, theirs)


@check(least=2)
def segments_leave_during_backward(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, LocalSGD(2, seat.size, bucket_bytes=100))
    under_way = []
    model.first.register_hook(lambda _: under_way.append(optimizer._strategy.in_flight))
    for turn in range(3):
        step(seat, model, optimizer, turn)
    # The first backward settles the plan; from then on all other gradients come before this one.
    assert under_way == [False, True, True]


@check(least=2)
def gradients_can_be_clipped(seat: Seat) -> None:
    def clipped(algorithm: Algorithm) -> Odd:
        model = Odd()
        optimizer = wrap(model, algorithm)
        for turn in range(4):
            inputs, targets = batch(seat.rank, turn)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            assert model.unused.grad is None
            model.bias.grad, model.scale.grad = model.bias.grad * 2, None
            with optimizer.skip_synchronize():
                optimizer.step()
        return model

    near(clipped(LocalSGD(2, seat.size)), clipped(AllReduce()))


@check(least=2, exchange=("sharded", "allreduce"))
def parameters_can_be_added_in_mid_run(seat: Seat, exchange: str) -> None:
    """No momentum is lost, whichever rank has it."""

    def grown(algorithm: Algorithm) -> list[torch.nn.Parameter]:
        model, late = Odd(), torch.nn.Parameter(torch.ones(9))
        optimizer = wrap(model, algorithm)
        for turn in range(3):
            step(seat, model, optimizer, turn)
        optimizer.add_param_group({"params": [late], "lr": 0.01})
        for turn in range(3, 6):
            inputs, targets = batch(seat.rank, turn)
            optimizer.zero_grad()
            (torch.nn.functional.mse_loss(model(inputs), targets) + (late * late.detach().cos()).sum()).backward()
            optimizer.step()
        return [*model.parameters(), late]

    for mine, wanted in zip(grown(LocalSGD(2, seat.size, exchange)), grown(AllReduce())):
        torch.testing.assert_close(mine, wanted, atol=2e-6, rtol=2e-5)


@check(least=2)
def a_state_can_be_broadcast(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, LocalSGD(2, seat.size), OPTIMIZERS["adam"])
    if seat.rank == 0:
        optimizer.param_groups[0]["lr"] = 0.003
    for turn in range(2):
        step(seat, model, optimizer, turn)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.003
    for state in optimizer.state_dict()["state"].values():
        seat.same("state", *(value for value in state.values() if isinstance(value, torch.Tensor)))


@check(least=2)
def two_optimizers_do_not_meet(seat: Seat) -> None:
    """Gradients of two optimizers do not mix, also if they come in another order on some ranks."""
    models = [Odd(), Odd()]
    optimizers = [wrap(model, LocalSGD(2, seat.size, bucket_bytes=200)) for model in models]
    plain = [Odd(), Odd()]
    wanted = [wrap(model, AllReduce()) for model in plain]
    for turn in range(4):
        inputs, targets = batch(seat.rank, turn)
        for both, its in ((models, optimizers), (plain, wanted)):
            for optimizer in its:
                optimizer.zero_grad()
            if turn == 2 and seat.rank == 0:
                with its[0].no_sync():
                    both[0].unused.sum().backward()
            losses = [torch.nn.functional.mse_loss(model(inputs), targets) for model in both]
            (losses[0] * 2 + losses[1] if seat.rank else losses[1] + losses[0] * 2).backward()
            for optimizer in its:
                optimizer.step()
    for model, other in zip(models, plain):
        near(model, other)


@check(least=2)
def a_state_from_before_is_not_lost(seat: Seat) -> None:
    for make in (OPTIMIZERS["momentum"], lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5)):
        found = []
        for algorithm in (LocalSGD(2, seat.size), AllReduce()):
            model = Odd()
            plain = make(list(model.parameters()))
            inputs, targets = batch(0, 0)
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            plain.step()
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), algorithm=algorithm)
            for turn in range(1, 4):
                step(seat, model, optimizer, turn)
            optimizer.state_dict()
            found.append(model)
        near(*found)


@check(least=2)
def misuse_of_shards_is_refused(seat: Seat) -> None:
    model = Odd()
    optimizer = wrap(model, LocalSGD(2, seat.size))
    inputs, targets = batch(seat.rank, 0)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    with pytest.raises(UsageError, match="call synchronize"), optimizer.skip_synchronize():
        optimizer.step()
    optimizer.step()
    with pytest.raises(UsageError, match="copy its state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(UsageError, match="not a state of LocalSGD: it lacks alone"):
        optimizer.load_state_dict({**optimizer.state_dict(), "sordino": {"steps": 1, "round": 1}})


@check(least=2, when=("before", "after"))
def looking_at_the_state_changes_nothing(seat: Seat, when: str) -> None:
    """`optimizer.state[parameter]` makes an empty entry. Loggers and schedule-free optimizers read it."""
    wanted = train(seat, LocalSGD(2, seat.size), 6, OPTIMIZERS["momentum"])
    model = Odd()
    optimizer = wrap(model, LocalSGD(2, seat.size), OPTIMIZERS["momentum"])

    def look() -> None:
        for parameter in model.parameters():
            optimizer.state[parameter].get("momentum_buffer")

    for turn in range(6):
        if when == "before":
            look()
        step(seat, model, optimizer, turn)
        if when == "after":
            look()
            assert optimizer.state_dict()["state"]
    for mine, theirs in zip(model.parameters(), wanted.parameters()):
        assert torch.equal(mine, theirs)
