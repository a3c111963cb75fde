"""Messages between two ranks: values, order, tags, any source, mismatches, and what ends a call without a partner."""

from __future__ import annotations

import random
import time

import pytest
import torch

import sordino.torch as hvd
from checks.reference import DTYPES, assert_equal, values
from checks.registry import Seat, check
from sordino.errors import OperationMismatch, UsageError

# Numbers of float32: none, one, the largest message that travels whole (64 KiB), one more, and megabytes.
COUNTS = (0, 1, 16_384, 16_385, 1_000_003)


def partner_of(seat: Seat) -> int | None:
    """Return the rank with which this one exchanges; None for the last rank of an odd number."""
    partner = seat.rank ^ 1
    return partner if partner < seat.size else None


@check(dtype=DTYPES)
def around_a_ring(seat: Seat, dtype: torch.dtype) -> None:
    """Each rank sends to the next one, and a rank that is alone to itself. All send first."""
    after, before = (seat.rank + 1) % seat.size, (seat.rank - 1) % seat.size
    for count in COUNTS:
        handle = hvd.send_async(values(seat.rank, count, dtype, wide=True), after, tag=count)
        got = torch.zeros(count, dtype=dtype)
        assert hvd.recv(got, before, tag=count) == before
        assert_equal(got, values(before, count, dtype, wide=True))
        assert hvd.synchronize(handle) is None


@check(least=2)
def blocking_calls(seat: Seat) -> None:
    partner = partner_of(seat)
    if partner is None:
        return
    for turn in range(20):
        for count in COUNTS[:4]:
            mine, got = values(seat.rank, count, torch.float32, seed=turn), torch.zeros(count)
            if seat.rank < partner:
                hvd.send(mine, partner)
                assert hvd.recv(got, partner) == partner
            else:
                assert hvd.recv(got, partner) == partner
                hvd.send(mine, partner)
            assert_equal(got, values(partner, count, torch.float32, seed=turn))


@check(least=2)
def unexpected_messages(seat: Seat) -> None:
    """More messages than a receiver buffers arrive before their receives, which are called in another order of tags."""
    partner = partner_of(seat)
    if partner is None:
        return
    handles = [
        hvd.send_async(values(seat.rank, count, torch.float32, seed=turn), partner, tag=tag)
        for tag, count in enumerate((3, 16_384, 40_000))
        for turn in range(24)
    ]
    for tag, count in reversed(list(enumerate((3, 16_384, 40_000)))):
        for turn in range(24):
            got = torch.zeros(count)
            hvd.recv(got, partner, tag=tag)
            assert_equal(got, values(partner, count, torch.float32, seed=turn))
    for handle in handles:
        hvd.synchronize(handle)


@check(least=2)
def any_source(seat: Seat) -> None:
    """One rank collects from all others, without knowing their order."""
    for collector in (0, seat.last):
        if seat.rank != collector:
            for turn in range(5):
                hvd.send(torch.tensor([seat.rank, turn]), collector, tag=8)
            continue
        turns = dict.fromkeys(range(seat.size), 0)
        for _ in range(5 * (seat.size - 1)):
            got = torch.zeros(2, dtype=torch.int64)
            source = hvd.recv(got, tag=8)
            assert got.tolist() == [source, turns[source]]
            turns[source] += 1
        assert turns[collector] == 0


@check()
def with_collectives(seat: Seat) -> None:
    """Messages and collectives do not disturb each other."""
    chosen = random.Random(seat.size)
    for turn in range(30):
        source, target = chosen.randrange(seat.size), chosen.randrange(seat.size)
        count = chosen.choice(COUNTS[1:])
        handles = []
        got = torch.zeros(count)
        if seat.rank == target:
            handles.append(hvd.recv_async(got, source, tag=turn))
        if seat.rank == source:
            handles.append(hvd.send_async(values(turn, count, torch.float32), target, tag=turn))
        total = hvd.allreduce(torch.ones(7), op=hvd.Sum)
        assert_equal(total, torch.full((7,), float(seat.size)))
        for handle in handles:
            hvd.synchronize(handle)
        if seat.rank == target:
            assert_equal(got, values(turn, count, torch.float32))


@check()
def random_exchanges(seat: Seat) -> None:
    """All ranks draw the same messages. Each makes its own calls in another order."""
    chosen, own = random.Random(7), random.Random(seat.rank)
    for turn in range(6):
        messages = [
            (chosen.randrange(seat.size), chosen.randrange(seat.size), chosen.randrange(3), chosen.choice(COUNTS[:4]))
            for _ in range(30)
        ]
        seeds = {index: 100 * turn + index for index in range(len(messages))}
        calls = []
        for index, (source, target, tag, _) in enumerate(messages):
            if source == seat.rank:
                calls.append((True, index, (source, target, tag)))
            if target == seat.rank:
                calls.append((False, index, (source, target, tag)))
        handles, outputs = [], {}
        while calls:
            at = own.randrange(len(calls))
            sends, index, key = calls[at]
            if any(before[0] == sends and before[2] == key for before in calls[:at]):
                continue  # calls for the same messages keep their order
            del calls[at]
            source, target, tag, count = messages[index]
            if sends:
                handles.append(hvd.send_async(values(source, count, torch.float32, seed=seeds[index]), target, tag))
            else:
                outputs[index] = torch.zeros(count)
                handles.append(hvd.recv_async(outputs[index], source, tag))
        for handle in own.sample(handles, len(handles)):
            hvd.synchronize(handle)
        for index, got in outputs.items():
            source, _, _, count = messages[index]
            assert_equal(got, values(source, count, torch.float32, seed=seeds[index]))


@check(least=2)
def handles_of_messages(seat: Seat) -> None:
    partner = partner_of(seat)
    if partner is None:
        return
    got = torch.zeros(5)
    receive = hvd.recv_async(got, tag=3)
    assert not hvd.poll(receive)
    hvd.send(torch.zeros(0), partner, tag=4)
    hvd.recv(torch.zeros(0), partner, tag=4)
    send = hvd.send_async(values(seat.rank, 5, torch.float32), partner, tag=3)
    while not (hvd.poll(receive) and hvd.poll(send)):
        pass
    assert hvd.synchronize(receive) == partner
    assert hvd.synchronize(send) is None
    assert hvd.synchronize(receive) is None  # as for other handles
    assert_equal(got, values(partner, 5, torch.float32))


@check(least=2)
def tensors_of_any_layout(seat: Seat) -> None:
    partner = partner_of(seat)
    if partner is None:
        return
    base = values(seat.rank, (6, 8), torch.float32)
    handle = hvd.send_async(base.t()[1:, ::2], partner)
    into = torch.zeros(6, 8)
    hvd.recv(into.t()[1:, ::2], partner)
    hvd.synchronize(handle)
    assert_equal(into.t()[1:, ::2].contiguous(), values(partner, (6, 8), torch.float32).t()[1:, ::2].contiguous())
    assert into[:, 0].abs().sum() == 0
    parameter = torch.nn.Parameter(torch.zeros(3))
    receive = hvd.recv_async(parameter, partner, tag=1)
    hvd.send(values(seat.rank, 3, torch.float32), partner, tag=1)
    hvd.synchronize(receive)
    assert_equal(parameter.detach(), values(partner, 3, torch.float32))
    shared = hvd.shared_empty(400_000)  # node peers read it in place
    shared.copy_(values(seat.rank, 400_000, torch.float32))
    handle = hvd.send_async(shared[7:], partner, tag=2)
    large = torch.zeros(399_993)
    hvd.recv(large, partner, tag=2)
    hvd.synchronize(handle)
    assert_equal(large, values(partner, 400_000, torch.float32)[7:])


@check(least=2)
def a_receive_changes_a_tensor_in_place(seat: Seat) -> None:
    """Autograd notices that a receive has overwritten a saved tensor."""
    partner = partner_of(seat)
    if partner is None:
        return
    weight, saved = torch.ones(4, requires_grad=True), torch.ones(4)
    product = (weight * saved).sum()
    handle = hvd.send_async(torch.zeros(4), partner)
    hvd.recv(saved, partner)
    hvd.synchronize(handle)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@check(least=3)
def process_sets_have_tags_of_their_own(seat: Seat) -> None:
    pairs = [hvd.add_process_set([rank, rank + 1]) for rank in range(0, seat.size - 1, 2)]
    partner = partner_of(seat)
    if partner is not None:
        mine = pairs[seat.rank // 2]
        hvd.send(torch.tensor([1.0]), partner)
        hvd.send(torch.tensor([2.0]), partner, process_set=mine)
        got = torch.zeros(1)
        assert hvd.recv(got, process_set=mine) == partner
        assert got.item() == 2.0
        assert hvd.recv(got) == partner
        assert got.item() == 1.0
        for other in set(range(seat.size)) - {seat.rank, partner}:
            with pytest.raises(UsageError, match=f"rank {other} is not a member of process set"):
                hvd.send(torch.zeros(1), other, process_set=mine)
    foreign = [one for one in pairs if seat.rank not in (one.ranks or [])]
    if foreign:
        with pytest.raises(UsageError, match="not a member"):
            hvd.recv(torch.zeros(1), process_set=foreign[0])
    for one in pairs:
        hvd.remove_process_set(one)


@check(least=2)
def mismatches_are_errors_on_both_ranks(seat: Seat) -> None:
    """The receive fails, the send or the next call fails, and later messages arrive."""
    if seat.rank == 0:
        for count in (10, 50_000):
            handle = hvd.send_async(torch.ones(count), 1, tag=1)
            seat.meet(f"refused {count}", (0, 1))
            if count == 50_000:
                with pytest.raises(OperationMismatch, match=r"expects 50000 elements of int32.*sent 50000 .*float32"):
                    hvd.synchronize(handle)
            else:
                hvd.synchronize(handle)
                with pytest.raises(OperationMismatch, match=r"expects 10 elements of int32.*This send was over before"):
                    for _ in range(3000):
                        hvd.send(torch.zeros(1), 1, tag=9)
                        time.sleep(0.01)
            hvd.send(torch.full((3,), 4.0), 1, tag=1)
    elif seat.rank == 1:
        for count in (10, 50_000):
            with pytest.raises(OperationMismatch, match=rf"recv from rank 0 with tag 1 on rank 1 expects {count} "):
                hvd.recv(torch.zeros(count, dtype=torch.int32), 0, tag=1)
            seat.meet(f"refused {count}", (0, 1))
            got = torch.zeros(3)
            hvd.recv(got, 0, tag=1)
            assert_equal(got, torch.full((3,), 4.0))


@check()
def invalid_calls(seat: Seat) -> None:
    tensor = torch.zeros(3)
    for call in (hvd.send, hvd.send_async, hvd.recv, hvd.recv_async):
        with pytest.raises(UsageError, match=f"ranks 0 to {seat.last}"):
            call(tensor, seat.size)
        for peer in (-1, 1.5, "1", True):
            with pytest.raises(UsageError, match="must be an integer from 0"):
                call(tensor, peer)  # type: ignore[arg-type]
        for tag in (-1, None, 2**63):
            with pytest.raises(UsageError):
                call(tensor, 0, tag=tag)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="complex64"):
            call(torch.zeros(3, dtype=torch.complex64), 0)
        with pytest.raises(UsageError, match="sparse"):
            call(tensor.to_sparse(), 0)
    with pytest.raises(UsageError, match="dst=None"):
        hvd.send(tensor, None)  # type: ignore[arg-type]
    hvd.send(tensor, seat.rank)  # nothing was sent before
    assert hvd.recv(tensor + 1, seat.rank) == seat.rank
