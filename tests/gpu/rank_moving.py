"""Broadcast, allgather, all-to-all, reducescatter and other operations that move device tensors between ranks."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from checks.moving import rows
from checks.odd import OPTIMIZERS, Odd
from checks.reference import DTYPES, FLOATS, assert_equal, assert_reduced, values
from rank_operations import inputs
from rank_seat import LeftOut, Seat, check

import sordino.torch as hvd
from sordino import checkpoint


@check(each=DTYPES)
def broadcasts(seat: Seat, dtype: torch.dtype) -> None:
    for root in range(seat.size):
        for length in (0, 1, 1000, 70001):
            mine, wanted = seat.put(values(seat.rank, length, dtype)), values(root, length, dtype)
            result = hvd.broadcast(mine, root_rank=root)
            assert result.device == seat.device
            assert_equal(result.cpu(), wanted)
            assert_equal(mine.cpu(), values(seat.rank, length, dtype))
            assert hvd.broadcast_(mine, root_rank=root) is mine
            assert_equal(mine.cpu(), wanted)


@check(each=DTYPES)
def allgathers_of_uneven_rows(seat: Seat, dtype: torch.dtype) -> None:
    for columns in ((), (3,), (5, 2)):
        shapes = [((3 * rank) % 7, *columns) for rank in range(seat.size)]
        given = [values(rank, shape, dtype) for rank, shape in enumerate(shapes)]
        result = hvd.allgather(seat.put(given[seat.rank]))
        assert result.device == seat.device
        assert_equal(result.cpu(), rows(*given))
    first, second = hvd.grouped_allgather([seat.put(one) for one in (given[seat.rank], given[seat.rank][:1])])
    assert_equal(first.cpu(), rows(*given))
    assert_equal(second.cpu(), rows(*(one[:1] for one in given)))


@check(each=DTYPES)
def alltoalls(seat: Seat, dtype: torch.dtype) -> None:
    splits = [[(sender * 2 + receiver) % 4 for receiver in range(seat.size)] for sender in range(seat.size)]
    given = [values(rank, (sum(splits[rank]), 3), dtype) for rank in range(seat.size)]
    result, received = hvd.alltoall(seat.put(given[seat.rank]), splits=splits[seat.rank])
    assert received.tolist() == [splits[sender][seat.rank] for sender in range(seat.size)]
    wanted = []
    for sender in range(seat.size):
        begin = sum(splits[sender][: seat.rank])
        wanted.append(given[sender][begin : begin + splits[sender][seat.rank]])
    assert result.device == seat.device
    assert_equal(result.cpu(), rows(*wanted))
    assert hvd.alltoall(seat.put(torch.full((seat.size,), seat.rank))).tolist() == list(range(seat.size))


@check(each=FLOATS)
def reducescatters(seat: Seat, dtype: torch.dtype) -> None:
    for op in (hvd.Sum, hvd.Average):
        for count in (0, 1, 2 * seat.size + 1, 1000):
            given = inputs(seat, (count, 3), dtype)
            result = hvd.reducescatter(seat.put(given[seat.rank]), op=op)
            base, extra = divmod(count, seat.size)
            begin = seat.rank * base + min(seat.rank, extra)
            end = begin + base + (seat.rank < extra)
            assert result.device == seat.device
            assert_reduced(result.cpu(), op, [one[begin:end] for one in given])


@check()
def many_kinds_under_way(seat: Seat) -> None:
    handles = []
    for k in range(12):
        given = inputs(seat, (2 * seat.size, 50), torch.float32, seed=k)
        mine = seat.put(given[seat.rank])
        handles.append((given, hvd.allreduce_async(mine, name=f"r{k}", op=hvd.Sum)))
        handles.append((given, hvd.allgather_async(mine, name=f"g{k}")))
        handles.append((given, hvd.broadcast_async(mine, seat.last, name=f"b{k}")))
        handles.append((given, hvd.reducescatter_async(mine, name=f"s{k}", op=hvd.Sum)))
    mine_of = slice(2 * seat.rank, 2 * seat.rank + 2)
    for number, (given, handle) in enumerate(handles):
        result = hvd.synchronize(handle).cpu()
        if number % 4 == 0:
            assert_reduced(result, hvd.Sum, given)
        elif number % 4 == 1:
            assert_equal(result, torch.cat(given))
        elif number % 4 == 2:
            assert_equal(result, given[seat.last])
        else:
            assert_reduced(result, hvd.Sum, [one[mine_of] for one in given])


@check()
def models_and_optimizers_are_broadcast(seat: Seat) -> None:
    model = Odd().to(seat.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seat.rank)
    hvd.broadcast_parameters(model.state_dict(), root_rank=seat.last)
    for mine, start in zip(model.parameters(), Odd().parameters()):
        assert mine.device == seat.device
        assert_equal(mine.detach().cpu(), (start.detach() + seat.last))
    optimizer = OPTIMIZERS["adam"](list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, seat.rank + 1.0)
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state["exp_avg"].device == seat.device
        seat.same("state", state["exp_avg"], float(state["step"]))
    found = hvd.broadcast_object({"t": seat.put(torch.ones(3) * seat.rank)}, root_rank=seat.last)
    assert found["t"].tolist() == [seat.last] * 3


@check()
def batch_normalization_over_all_ranks(seat: Seat) -> None:
    given = inputs(seat, (4, 3, 5), torch.float64)
    norm = hvd.SyncBatchNorm(3).double().to(seat.device)
    mine = seat.put(given[seat.rank]).requires_grad_()
    result = norm(mine)
    plain = torch.nn.BatchNorm1d(3).double()
    whole = torch.cat(given).requires_grad_()
    wanted = plain(whole)
    torch.testing.assert_close(result.detach().cpu(), wanted.detach()[4 * seat.rank : 4 * seat.rank + 4])
    result.square().sum().backward()
    wanted.square().sum().backward()
    assert mine.grad is not None and whole.grad is not None
    torch.testing.assert_close(mine.grad.cpu(), whole.grad[4 * seat.rank : 4 * seat.rank + 4], atol=1e-9, rtol=1e-6)
    torch.testing.assert_close(norm.running_var.cpu(), plain.running_var)


@check()
def checkpoints(seat: Seat) -> None:
    """A model in an arena continues after it was saved and loaded, as without an interruption."""

    def make() -> tuple[torch.nn.Module, hvd.DistributedOptimizer]:
        model = Odd().to(seat.device)
        inner = OPTIMIZERS["momentum"](list(model.parameters()))
        return model, hvd.DistributedOptimizer(inner, model.named_parameters(), algorithm="local-sgd")

    def go_on(model: torch.nn.Module, optimizer: hvd.DistributedOptimizer) -> None:
        for turn in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * (turn + 1) * (seat.rank + 1))
            optimizer.step()

    model, optimizer = make()
    go_on(model, optimizer)
    path = Path(seat.folder) / f"model.{seat.rank}"
    checkpoint.save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    loaded = checkpoint.load(path)
    other, resumed = make()
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(copy.deepcopy(loaded["optimizer"]))
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert theirs.device == seat.device
        assert_equal(theirs.detach().cpu(), mine.detach().cpu())
    go_on(model, optimizer)
    go_on(other, resumed)
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert_equal(theirs.detach().cpu(), mine.detach().cpu())


@check(cuda=True)
def cupy_arrays(seat: Seat) -> None:
    try:
        import cupy
    except ImportError:
        raise LeftOut("cupy is not installed") from None
    given = inputs(seat, 1000, torch.float32)
    with cupy.cuda.Device(seat.device.index or 0):
        mine = cupy.asarray(given[seat.rank].numpy())
    result = hvd.allreduce(mine, op=hvd.Sum)
    assert_reduced(torch.as_tensor(result, device=seat.device).cpu(), hvd.Sum, given)
