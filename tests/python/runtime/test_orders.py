"""Orders of calls that differ between ranks or are unusual: no rank hangs or crashes, and nothing is reduced twice."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch
from pace import stretched

import sordino.torch as hvd
from sordino import sim
from sordino.errors import PeerLost, StepOrderError, UsageError


def linear(weight: float = 1.0) -> torch.nn.Linear:
    layer = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(layer.weight, weight)
    torch.nn.init.constant_(layer.bias, 0.0)
    return layer


def test_names_of_a_process_set_do_not_put_the_world_out_of_step() -> None:
    def body() -> int:
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            hvd.broadcast_object({"a": 1}, process_set=pair)
            model = linear()
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=pair
            )
        model = linear()
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        return int(hvd.broadcast_object(7 if hvd.rank() == 0 else None))

    assert sim.run(3, body) == [7, 7, 7]


def test_unnamed_operations_match_again_after_a_join() -> None:
    def body() -> float:
        for _ in range(1 + 2 * hvd.rank()):
            hvd.allreduce(torch.ones(3))
        hvd.join()
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert sim.run(3, body) == [3, 3, 3]


def test_a_join_may_wait_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline_s = stretched(0.5)
    monkeypatch.setenv("SORDINO_TIMEOUT_S", str(deadline_s))
    monkeypatch.setenv("SORDINO_STALL_WARN_S", str(deadline_s / 2))

    def body() -> int:
        if hvd.rank() == 1:
            for _ in range(15):
                hvd.allreduce(torch.ones(2))
                time.sleep(deadline_s / 5)
        return hvd.join()

    assert sim.run(2, body) == [1, 1]


def test_a_stall_is_reported_once_and_blamed_on_the_late_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SORDINO_STALL_WARN_S", "0.2")

    def body() -> None:
        time.sleep([0, 2.8, 0][hvd.rank()])  # longer than rank 2 trusts a silent coordinator
        hvd.allreduce(torch.ones(2), name="late")

    sim.run(3, body)
    stalls = [line for line in caplog.messages if line.startswith("stalled: ")]
    assert len(stalls) == 1 and "'allreduce.late' has waited" in stalls[0] and "for rank 1:" in stalls[0], stalls


def test_unfrozen_parameters_are_reduced_once_and_so_are_the_others() -> None:
    def body() -> list[float]:
        model = torch.nn.ModuleList([linear(), linear()])
        model[1].requires_grad_(False)
        opt = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), op=hvd.Sum
        )
        seen = []
        for step in range(4):
            if step == 2:
                model[1].requires_grad_(True)
            opt.zero_grad()
            sum(layer(torch.ones(1, 2)).sum() for layer in model).backward()
            opt.step()
            seen.append(model[0].weight.grad[0, 0].item())
            if step >= 2:
                seen.append(model[1].weight.grad[0, 0].item())
        return seen

    assert sim.run(2, body) == [[2.0] * 6] * 2


@pytest.mark.parametrize(("op", "wanted"), [(hvd.Sum, 2.0), (hvd.Average, 1.0)])
def test_two_backwards_of_other_parameters(op: int, wanted: float) -> None:
    """Averages may be averaged again, but sums may not be summed again. All passes but the last can be in no_sync()."""

    def body() -> list[float]:
        first, second = linear(), linear()
        parameters = [*first.parameters(), *second.parameters()]
        opt = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), op=op)
        for turn in range(3):
            opt.zero_grad()
            with opt.no_sync() if turn != 1 else nullcontext():
                first(torch.ones(1, 2)).sum().backward()
            assert opt.param_groups[0]["lr"] == 0.0
            if turn == 1 and op == hvd.Sum:
                with pytest.raises(StepOrderError, match="no_sync"):
                    second(torch.ones(1, 2)).sum().backward()
            else:
                second(torch.ones(1, 2)).sum().backward()
            opt.step()
        return [layer.weight.grad[0, 0].item() for layer in (first, second)]

    assert sim.run(2, body) == [[wanted, wanted]] * 2


def test_two_optimizers_of_equal_sparse_models_do_not_clash() -> None:
    def body() -> bool:
        tables = [torch.nn.Embedding(5, 2, sparse=True) for _ in range(2)]
        opts = [
            hvd.DistributedOptimizer(torch.optim.SparseAdam(list(table.parameters())), table.named_parameters())
            for table in tables
        ]
        for _ in range(3):
            for opt in opts:
                opt.zero_grad()
            sum(table(torch.tensor([hvd.rank(), 3])).sum() for table in tables).backward()
            for opt in opts:
                opt.step()
        return True

    assert all(sim.run(2, body))


def test_what_a_rank_announced_before_it_left_fails_for_the_others() -> None:
    def body() -> str:
        if hvd.rank() == 1:
            hvd.allreduce_async(torch.ones(4), name="a")
            return "left"
        time.sleep(0.3)
        with pytest.raises(PeerLost) as caught:
            hvd.allreduce(torch.ones(4), name="a")
        return str(caught.value.ranks)

    assert sim.run(2, body) == ["(1,)", "left"]


def test_a_process_set_is_not_removed_under_an_operation() -> None:
    def staggered() -> float:
        pair = hvd.add_process_set([0, 1])
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(torch.ones(2), name="x", process_set=pair)
            with pytest.raises(UsageError, match="under way"):
                hvd.remove_process_set(pair)
            hvd.barrier()
            hvd.synchronize(handle)
        else:
            hvd.barrier()
            if hvd.rank() == 1:
                hvd.allreduce(torch.ones(2), name="x", process_set=pair)
        assert hvd.remove_process_set(pair)
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert sim.run(3, staggered) == [3, 3, 3]


def test_overlapping_tensors_of_one_group_are_refused() -> None:
    whole = torch.ones(10)
    with pytest.raises(UsageError, match="overlap"):
        sim.run(1, lambda: hvd.grouped_allreduce_([whole[:6], whole[5:]]))


def test_float16_averages_stay_in_range_between_nodes() -> None:
    def body() -> float:
        return hvd.allreduce(torch.full((40000,), 60000.0, dtype=torch.float16)).max().item()

    for value in sim.run(3, body, ranks_per_node=1):
        assert value == pytest.approx(60000, rel=2e-3)
