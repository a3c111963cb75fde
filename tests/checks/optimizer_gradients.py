"""Which gradients exist, where they are stored, and how missing ones are treated."""

from __future__ import annotations

import torch
from torch import nn

import sordino.torch as hvd
from checks.agreement import raises
from checks.models import batch, loss_of, make_model, part
from checks.reference import values
from checks.registry import Seat, check
from checks.training import ROWS, Twins, sgd
from sordino.algorithms import AllReduce
from sordino.errors import LayoutMismatch, StepOrderError, UsageError


@check(pattern=("TTTT", "FFFFF", "TFTFTFTF", "FFFTTTFFF", "TTFFFFTTFF"))
def set_to_none_and_back(seat: Seat, pattern: str) -> None:
    """Gradients that persist move into shared memory; new ones are reduced where they are."""
    twins = Twins(seat)
    for letter in pattern:
        twins.zero(set_to_none=letter == "T")
        twins.backward()
        twins.step()
        twins.check_gradients()
    twins.check()


@check()
def without_zero_grad(seat: Seat) -> None:
    """Without zero_grad() the averaged gradients add up from step to step, as in Horovod."""
    twins = Twins(seat)
    for _ in range(4):
        twins.backward()
        twins.step()
        twins.check_gradients()
    twins.check()


@check()
def gradients_set_by_hand(seat: Seat) -> None:
    twins = Twins(seat)
    for turn in range(4):
        for model in (twins.model, twins.twin):
            for i, parameter in enumerate(model.parameters()):
                own = [
                    values(rank, tuple(parameter.shape), torch.float64, seed=10 * turn + i) for rank in range(seat.size)
                ]
                parameter.grad = own[seat.rank] if model is twins.model else sum(own) / seat.size
        twins.step()
        twins.check_gradients()
    twins.check()


@check()
def replaced_between_steps(seat: Seat) -> None:
    """The user puts another tensor, or None, in place of .grad."""
    twins = Twins(seat)
    for turn in range(6):
        twins.zero(set_to_none=False)
        if turn in (3, 4):
            for parameter in twins.model.parameters():
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter) if turn == 3 else None
        twins.backward()
        twins.step()
        twins.check_gradients()
    twins.check()


@check(set_to_none=(True, False))
def used_by_some_ranks(seat: Seat, set_to_none: bool) -> None:
    """All ranks get the average, in which missing gradients count as zeros. A parameter that no rank used keeps no
    gradient."""
    model = make_model("branches", 3)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    twin = make_model("branches", 3)
    reference = sgd(twin)
    for turn in range(6):
        lefts = [(rank + turn) % 2 == 0 if turn < 4 else True for rank in range(seat.size)]
        optimizer.zero_grad(set_to_none=set_to_none)
        reference.zero_grad(set_to_none=set_to_none)
        whole = batch(ROWS * seat.size, turn)
        loss_of(model, *part(whole, seat.rank, seat.size), lefts[seat.rank]).backward()
        for rank, left in enumerate(lefts):
            (loss_of(twin, *part(whole, rank, seat.size), left) / seat.size).backward()
        optimizer.step()
        reference.step()
        assert model.never.weight.grad is None and model.never.bias.grad is None
        for (name, mine), wanted in zip(model.named_parameters(), twin.parameters()):
            assert (mine.grad is None) == (wanted.grad is None), (turn, name)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, wanted.grad, atol=1e-12, rtol=1e-12)
            torch.testing.assert_close(mine, wanted, atol=1e-12, rtol=1e-12)
            seat.same(name, mine)


@check(least=2)
def one_is_missing_among_gradients_that_persist(seat: Seat) -> None:
    """The average of the step before, which is still in the shared memory of the missing gradient, is not sent."""
    one, other = (nn.Parameter(torch.zeros(5)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one, other], lr=0.0))
    for turn in range(6):
        missing = turn > 2 and seat.rank == 0
        if missing:
            other.grad = None
        optimizer.zero_grad(set_to_none=False)
        loss = one.sum() if missing else one.sum() + other.sum()
        ((seat.rank + 1) * loss).backward()
        optimizer.step()
        total = seat.size * (seat.size + 1) / 2
        torch.testing.assert_close(one.grad, torch.full((5,), total / seat.size))
        torch.testing.assert_close(other.grad, torch.full((5,), (total - (turn > 2)) / seat.size))


@check(least=2)
def a_rank_without_any_gradient(seat: Seat) -> None:
    model = make_model("small", 3)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for turn in range(3):
        optimizer.zero_grad()
        if seat.rank == 0:
            sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        for parameter, before in zip(model.parameters(), start):
            torch.testing.assert_close(parameter.detach(), before - (turn + 1) / seat.size)


@check()
def nobody_has_any_gradient(seat: Seat) -> None:
    model = make_model("small", 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state


@check(least=2)
def backward_in_different_order(seat: Seat) -> None:
    """The order of gradients may differ between ranks and from step to step."""
    weights = [nn.Parameter(torch.full((30,), float(i), dtype=torch.float64)) for i in range(8)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=0.5), groups=4)
    for turn in range(4):
        optimizer.zero_grad(set_to_none=turn % 2 == 0)
        order = sorted(range(8), key=lambda i: (i * (seat.rank + turn + 1)) % 11)
        for i in order:
            (weights[i] * (seat.rank + i)).sum().backward()
        optimizer.step()
        for i, weight in enumerate(weights):
            assert torch.allclose(weight.grad, torch.full_like(weight, i + (seat.size - 1) / 2))
            seat.same("weight", weight)


@check(set_to_none=(True, False))
def frozen_and_unfrozen(seat: Seat, set_to_none: bool) -> None:
    twins = Twins(seat)

    def freeze(frozen: bool) -> None:
        for model in (twins.model, twins.twin):
            model[0].requires_grad_(not frozen)

    for frozen in (True, False, True, False):
        freeze(frozen)
        twins.train(3, set_to_none=set_to_none)
        twins.check()


@check()
def frozen_from_the_start(seat: Seat) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        model[0].requires_grad_(False)
        return sgd(model)

    twins = Twins(seat, make=make)
    twins.train(2)
    assert twins.model[0].weight.grad is None
    for model in (twins.model, twins.twin):
        model[0].requires_grad_(True)
    twins.train(3)
    twins.check()
    assert not torch.equal(twins.start[0], twins.model[0].weight)


@check()
def two_optimizers_that_take_turns(seat: Seat) -> None:
    """As in adversarial training, each optimizer freezes the parameters of the other."""
    twins = Twins(seat)
    twins.optimizer = None  # its hooks are removed with it
    halves = [[model[0], model[2]] for model in (twins.model, twins.twin)]
    wrapped = [hvd.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1)) for part in halves[0]]
    plain = [torch.optim.SGD(part.parameters(), lr=0.1) for part in halves[1]]
    for turn in range(6):
        for layers, optimizers in zip(halves, (wrapped, plain)):
            for index, layer in enumerate(layers):
                layer.requires_grad_(index == turn % 2)
                optimizers[index].zero_grad()
        twins.backward()
        wrapped[turn % 2].step()
        plain[turn % 2].step()
        assert all(p.grad is None for p in halves[0][1 - turn % 2].parameters())
    twins.check()


@check()
def shared_parameters(seat: Seat) -> None:
    twins = Twins(seat, "tied")
    twins.train(3)
    twins.train(3, set_to_none=False)
    twins.check()
    assert twins.model.first.weight is twins.model.second.weight


@check(memory=("channels_last", "contiguous", "changed later"))
def images_in_any_memory_order(seat: Seat, memory: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        if memory == "channels_last":
            model.to(memory_format=torch.channels_last)
        return sgd(model)

    twins = Twins(seat, "conv", make)
    twins.train(3)
    if memory == "changed later":
        twins.model.to(memory_format=torch.channels_last)
    twins.train(4, set_to_none=False)
    twins.check()


@check(least=2)
def memory_orders_that_differ_between_ranks(seat: Seat) -> None:
    """The memory orders are either supported or refused, but elements that do not belong together are never added."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        if seat.rank % 2:
            model.to(memory_format=torch.channels_last)
        return sgd(model)

    try:
        twins = Twins(seat, "conv", make)
    except LayoutMismatch:
        seat.same("refused", True)
        return
    twins.train(3)
    twins.check()


@check(dense=(False, True), algorithm=("SGD", "SparseAdam", "Adagrad"))
def sparse_embeddings(seat: Seat, dense: bool, algorithm: str) -> None:
    """Ranks look up different rows, and different numbers of rows."""

    def network() -> nn.Embedding:
        table = nn.Embedding(12, 3, sparse=True).double()
        with torch.no_grad():
            table.weight.copy_(values(0, (12, 3), torch.float64, seed=8))
        return table

    make = {
        "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        "SparseAdam": lambda m: torch.optim.SparseAdam(list(m.parameters()), lr=0.1),
        "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    }[algorithm]
    model, twin = network(), network()
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), sparse_as_dense=dense)
    reference = make(twin)
    for turn in range(3):
        look_ups = [
            torch.tensor([(5 * rank + 3 * i + turn) % 12 for i in range(1 + rank)]) for rank in range(seat.size)
        ]
        optimizer.zero_grad()
        reference.zero_grad()
        (model(look_ups[seat.rank]) ** 2).sum().backward()
        (sum((twin(rows) ** 2).sum() for rows in look_ups) / seat.size).backward()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(model.weight, twin.weight, atol=1e-10, rtol=1e-10)
        seat.same("weight", model.weight)


@check(least=2)
def sparse_gradients_on_some_ranks(seat: Seat) -> None:
    table = nn.Embedding(6, 2, sparse=True).double()
    nn.init.zeros_(table.weight)
    head = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, head], lr=1.0))
    for turn in range(3):
        optimizer.zero_grad()
        loss = head.sum()
        if seat.rank == 0 or turn == 2:
            loss = loss + table(torch.tensor([turn])).sum()
        loss.backward()
        optimizer.step()
    wanted = torch.zeros(6, 2, dtype=torch.float64)
    wanted[:2] = -1 / seat.size
    wanted[2] = -1
    torch.testing.assert_close(table.weight.detach(), wanted)
    assert head.tolist() == [-3.0, -3.0]


@check(least=2, set_to_none=(True, False))
def sparse_gradients_that_are_missing_or_without_rows(seat: Seat, set_to_none: bool) -> None:
    """A momentum moves the rows of a table without look-ups, but not those of a table that no rank has used."""
    table, twin = (nn.Embedding(6, 2, sparse=True).double() for _ in range(2))
    with torch.no_grad():
        table.weight.copy_(values(0, (6, 2), torch.float64, seed=9))
        twin.weight.copy_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.5))
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.5)
    none: list[list[int] | None] = [None] * seat.size
    look_ups = [[[rank, 5] for rank in range(seat.size)], none, [[]] * seat.size, [*none[1:], []], [*none[1:], [3]]]
    for turn in look_ups:
        optimizer.zero_grad(set_to_none=set_to_none)
        reference.zero_grad(set_to_none=set_to_none)
        for rank, rows in enumerate(turn):
            for one in (table, twin) if rank == seat.rank else (twin,):
                if rows is not None:
                    scale = 1 if one is table else seat.size
                    ((one(torch.tensor(rows, dtype=torch.int64)) ** 2).sum() / scale).backward()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(table.weight, twin.weight, atol=1e-12, rtol=1e-12)
        gradient = table.weight.grad
        assert (gradient is None) == (twin.weight.grad is None)
        assert gradient is None or not gradient._indices().lt(0).any()


@check(least=2)
def sparse_gradients_are_summed_once(seat: Seat) -> None:
    """Other reductions than sums need the zeros as well, and are refused. A sum of sums is refused, as with dense
    gradients."""
    for op in (hvd.Min, hvd.Max, hvd.Product):
        table = nn.Embedding(6, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), op=op)
        raises(UsageError, "sparse_as_dense=True", lambda: table(torch.tensor([seat.rank])).sum().backward())  # noqa: B023
    table = nn.Embedding(6, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), op=hvd.Sum)
    table(torch.tensor([1])).sum().backward()
    raises(StepOrderError, "no_sync", lambda: table(torch.tensor([1])).sum().backward())
    optimizer.zero_grad()


@check()
def a_large_model_in_many_buckets(seat: Seat) -> None:
    """Gradients of megabytes, so that no bucket is fused; with and without persistent gradients."""
    sizes = [1, 300_000, 7, 250_000, 90_000, 3]
    weights = [nn.Parameter(values(0, (size,), torch.float32, seed=i)) for i, size in enumerate(sizes)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), algorithm=AllReduce(bucket_bytes=1 << 20))
    for turn in range(4):
        optimizer.zero_grad(set_to_none=turn == 0)
        sum((weight * (seat.rank + 1 + turn)).sum() for weight in weights).backward()
        optimizer.step()
        for weight in weights:
            mean = (seat.size + 1) / 2 + turn
            assert torch.allclose(weight.grad, torch.full_like(weight, mean))
            seat.same("weight", weight)


@check(least=2, to=("half", "smaller", "larger"))
def parameters_become_others(seat: Seat, to: str) -> None:
    """After a model is cast or cut between steps, the gradients of this step are sent, in their present shape.

    Gradients are averages when backward() returns, also in the first one after a cast. Torch compares the shapes of
    gradients with the kept AccumulateGrad node, so parameters that are cut need a new wrapper, as with DDP.
    """
    model = nn.Linear(6, 8)
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    for step in range(4):
        if step == 2 and to == "half":
            model.bfloat16()
        elif step == 2:
            optimizer = None
            for parameter in model.parameters():
                parameter.data = (
                    parameter.data[:5].clone() if to == "smaller" else parameter.data.repeat_interleave(2, 0)
                )
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        optimizer.zero_grad()
        model(torch.full((1, 6), 1.0 + seat.rank, dtype=model.weight.dtype)).sum().backward()
        mean = torch.full_like(model.weight, (seat.size + 1) / 2)
        torch.testing.assert_close(model.weight.grad, mean)
        optimizer.step()
        torch.testing.assert_close(model.weight.grad, mean)
        torch.testing.assert_close(model.bias.grad, torch.ones_like(model.bias))
