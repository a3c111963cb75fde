"""A rank of a job with DDP's communication hooks: `hooks_worker.py PART STORE RANK SIZE`.

Results are compared with those of torch's own hooks, with the backend in SORDINO_TEST_BACKEND.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from sordino.distributed import hooks
from sordino.errors import UsageError

Pair = tuple[torch.nn.Module, torch.optim.Optimizer]


def made(group: Any) -> Pair:
    """Return a model in DDP, in several buckets, and its optimizer."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 2))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def train(pair: Pair, step: int, scale: float = 1.0) -> None:
    model, optimizer = pair
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    optimizer.zero_grad()
    (scale * model(torch.randn(8, 20, generator=generator)).square().mean()).backward()
    optimizer.step()


def compare(group: Any, ours: Callable[[Pair], Any], theirs: Callable[[Pair], Any], tolerance: float) -> None:
    """Compare two hooks for some steps. `ours` and `theirs` register them; `theirs` may return a function to call after
    each step."""
    one, other = made(group), made(group)
    ours(one)
    after = theirs(other)
    for step in range(7):
        train(one, step)
        train(other, step)
        if after is not None:
            after()
        for mine, wanted in zip(one[0].parameters(), other[0].parameters()):
            for found, expected in ((mine.grad, wanted.grad), (mine, wanted)):
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def compressed(group: Any) -> None:
    def bf16(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses its own on a CPU, by its name
        return default_hooks.bf16_compress_hook(state, bucket)

    # A division by 2 has the same result before and after a cast to bfloat16. Numbers near 0 lose digits in float16.
    of_bf16 = 0.0 if dist.get_world_size() == 2 else 4e-3
    torchs = {"none": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook, "bf16": bf16}
    for (name, hook), tolerance in zip(torchs.items(), (0.0, 1e-3, of_bf16)):
        state = hooks.Compressed(getattr(hooks.Compression, name), group)
        compare(
            group,
            lambda pair: pair[0].register_comm_hook(state, hooks.average),  # noqa: B023
            lambda pair: pair[0].register_comm_hook(group, hook),  # noqa: B023
            tolerance,
        )


def encoded(group: Any) -> None:
    warnings.simplefilter("error", FutureWarning)  # of names that torch has replaced
    for codec, tolerance in (("float16", 1e-3), ("Int8(block=32)", 3e-2), ("TopK(ratio=1, chunk=32, bits=32)", 1e-5)):
        compare(
            group,
            lambda pair: pair[0].register_comm_hook(hooks.Encoded(codec, group), hooks.average),  # noqa: B023
            lambda pair: pair[0].register_comm_hook(group, default_hooks.allreduce_hook),
            tolerance,
        )
    # Residuals are sent later, so a constant gradient arrives in full after some steps. Two models share one state.
    models = [DistributedDataParallel(torch.nn.Linear(64, 1, bias=False), process_group=group) for _ in range(2)]
    state = hooks.Encoded("TopK(ratio=0.25, chunk=32)", group)
    inputs, totals = torch.linspace(0.5, 1.5, 64), [torch.zeros(64) for _ in models]
    for model in models:
        model.register_comm_hook(state, hooks.average)
    for _ in range(40):
        for model, total in zip(models, totals):
            model.zero_grad()
            model(inputs).sum().backward()
            total += model.module.weight.grad[0]
    for total in totals:
        torch.testing.assert_close(total / 40, inputs, rtol=0.2, atol=0)
    assert len(state._means) == len(models)
    warnings.simplefilter("default", FutureWarning)


class After(hooks.BucketAverage):
    """Sends gradients as they are in the first steps, like torch's start_powerSGD_iter."""

    def __init__(self, start: int, then: hooks.BucketAverage) -> None:
        self.left, self.then, self.before = start, then, hooks.Compressed(group=then.group)

    def start(self, bucket: Any) -> Any:
        how = self.before if self.left > 0 else self.then
        self.left -= bucket.is_last()
        return how.start(bucket)


def low_rank(group: Any) -> None:
    """PowerSGD reaches the loss of exact averages, as torch's hook does, which differs only in the first factor."""
    world = dist.get_world_size()

    def trained(register: Callable[[Any], None] | None) -> tuple[float, Any]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(20, 40, bias=False), torch.nn.Tanh(), torch.nn.Linear(40, 16))
        # One bucket: with several on a CPU, torch's hook starts their second all-reduces in a varying order.
        ddp = DistributedDataParallel(model, process_group=group)
        if register is not None:
            register(ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.5)
        teacher = torch.randn(20, 16, generator=torch.Generator().manual_seed(5))
        for step in range(60):
            inputs = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
            optimizer.zero_grad()
            (ddp(inputs) - (inputs @ teacher).tanh()).square().mean().backward()
            optimizer.step()
        test = torch.randn(500, 20, generator=torch.Generator().manual_seed(9))
        return float((model(test) - (test @ teacher).tanh()).square().mean().detach()), ddp

    def ours(ddp: Any) -> None:
        ddp.register_comm_hook(After(2, hooks.Encoded("PowerSGD(rank=2)", group)), hooks.average)

    def theirs(ddp: Any) -> None:
        state = PowerSGDState(group, 2, start_powerSGD_iter=2, min_compression_rate=1, warm_start=True)
        ddp.register_comm_hook(state, powerSGD_hook)

    (exact, _), (mine, ddp), (other, _) = trained(None), trained(ours), trained(theirs)
    print(f"losses: exact {exact:.4f}, PowerSGD {mine:.4f}, torch's {other:.4f}", flush=True)
    assert abs(mine - exact) <= 1.1 * abs(other - exact) + 1e-3
    flat = torch.nn.utils.parameters_to_vector(ddp.parameters()).detach()
    everywhere = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(everywhere, flat, group=group)
    assert all(torch.equal(one, flat) for one in everywhere)


class Reversed(torch.nn.Module):
    """Two layers of the same shape, registered in the order of their gradients. DDP expects the reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = (torch.nn.Linear(24, 24, bias=False) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs))


def low_rank_adds_up(group: Any) -> None:
    """The sum of all averages plus the mean residual is the sum of the exact averages, from the step at which buckets
    are final."""
    torch.manual_seed(1)
    plain, size = Reversed(), dist.get_world_size()
    model = DistributedDataParallel(copy.deepcopy(plain), process_group=group, bucket_cap_mb=0.001)
    state = hooks.Encoded("PowerSGD(rank=2)", group)
    model.register_comm_hook(state, hooks.average)
    total, wanted = torch.zeros(2, 24, 24), torch.zeros(2, 24, 24)
    for step in range(6):
        for rank in range(size):
            generator = torch.Generator().manual_seed(100 * step + rank)
            inputs, factors = (torch.randn(30, 24, generator=generator) for _ in range(2))
            modules = [plain, model] if rank == dist.get_rank() else [plain]
            for module in modules:
                module.zero_grad()
                (module(inputs) * factors).sum().backward()
            wanted += (step > 0) * torch.stack([one.grad for one in plain.parameters()]) / size
        total += (step > 0) * torch.stack([one.grad for one in model.parameters()])
    assert (total - wanted).norm() > 1  # so the residuals were needed
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    for parameters, (_, mean) in state._means.items():
        for number, left in mean.matrix_residuals.items():
            left = left.clone()
            dist.all_reduce(left, group=group)
            total[places[parameters[number]]] += left / size
    torch.testing.assert_close(total, wanted, atol=1e-3, rtol=1e-4)


class Lookup(torch.nn.Module):
    """An embedding with sparse gradients, and a layer with dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = torch.nn.Embedding(5, 4, sparse=True), torch.nn.Linear(4, 3)

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.layer(self.rows(places))


def sparse(group: Any) -> None:
    """Sparse gradients are averaged without compression, whatever the hook does with dense ones."""
    rank = dist.get_rank()
    for state in (
        hooks.Compressed(hooks.Compression.bf16, group),
        *(hooks.Encoded(c, group) for c in ("int8", "powersgd")),
    ):
        torch.manual_seed(1)
        plain = Lookup()
        ours, wanted = (DistributedDataParallel(one, process_group=group) for one in (copy.deepcopy(plain), plain))
        ours.register_comm_hook(state, hooks.average)
        for _ in range(2):  # DDP rebuilds its buckets after the first step
            for model in (ours, wanted):
                model.zero_grad()
                model(torch.tensor([rank, rank + 1, rank])).square().sum().backward()
        found, expected = (model.module.rows.weight.grad for model in (ours, wanted))
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), expected.to_dense())


def ranges(group: Any) -> None:
    """An average beyond the range of float16 is infinite on all ranks. Other averages are finite, even if a gradient is
    beyond it."""
    for value, others, wanted in ((3e5, 3e5, float("inf")), (1e5, 0.0, 1e5 / dist.get_world_size())):
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), process_group=group)
        model.register_comm_hook(hooks.Compressed(hooks.Compression.fp16, group), hooks.average)
        (model(torch.ones(1, 1)).sum() * (value if dist.get_rank() == 0 else others)).backward()
        gradient = model.module.weight.grad
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, torch.tensor([[wanted]]), rtol=1e-3, atol=0)


def post_local_sgd(group: Any) -> None:
    for within in (None, hooks.Compressed(group=group)):

        def ours(pair: Pair) -> None:
            before = hooks.Compressed(group=group)
            state = hooks.PostLocalSGD(pair[1], start=2, interval=3, before=before, within=within, group=group)  # noqa: B023
            pair[0].register_comm_hook(state, hooks.average)

        def theirs(pair: Pair) -> Callable[[], None]:
            state = PostLocalSGDState(group, group, 2, post_local_gradient_allreduce=within is not None)  # noqa: B023
            pair[0].register_comm_hook(state, post_localSGD_hook)
            averager = PeriodicModelAverager(period=3, warmup_steps=4, process_group=group)
            return lambda: averager.average_parameters(pair[0].parameters())

        compare(group, ours, theirs, tolerance=1e-6)


def another_state(group: Any) -> None:
    """A state of another kind, like a compression that sends only the largest element."""

    class Largest(hooks.BucketAverage):
        def start(self, bucket: Any) -> Any:
            gradients = bucket.buffer()
            place = int(gradients.abs().argmax())
            rooms = [torch.empty(2, dtype=torch.float64) for _ in range(dist.get_world_size())]
            mine = torch.tensor([place, float(gradients[place])], dtype=torch.float64)
            work = dist.all_gather(rooms, mine, group=group, async_op=True)

            def finish(future: Any) -> torch.Tensor:
                future.value()
                gradients.zero_()
                for room in rooms:
                    gradients[int(room[0])] += float(room[1]) / len(rooms)
                return gradients

            return work.get_future().then(finish)

    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False), process_group=group)
    model.register_comm_hook(Largest(), hooks.average)
    (model(torch.tensor([[1.0, 2.0, 3.0]])).sum() * (dist.get_rank() + 1)).backward()
    size = dist.get_world_size()
    torch.testing.assert_close(model.module.weight.grad, torch.tensor([[0.0, 0.0, 3 * (size + 1) / 2]]))


def errors(group: Any) -> None:
    optimizer = made(group)[1]
    for call, text in (
        (lambda: hooks.average(None, None), "register_comm_hook(hooks.Compressed"),
        (lambda: hooks.Compressed("fp16"), "Compressed('fp16')"),
        (lambda: hooks.Encoded("int9"), "no such codec"),
        (lambda: hooks.Encoded("none"), "without a codec"),
        (lambda: hooks.PostLocalSGD(optimizer, start=-1, interval=2), "start=-1"),
        (lambda: hooks.PostLocalSGD(optimizer, start=0, interval=0), "interval=0"),
    ):
        try:
            call()
        except UsageError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"{text}: not refused")


def all_parts() -> None:
    for part in (
        compressed,
        encoded,
        low_rank,
        low_rank_adds_up,
        sparse,
        ranges,
        post_local_sgd,
        another_state,
        errors,
    ):
        part(dist.group.WORLD)


def main() -> None:
    store, rank, size = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    backend = os.environ.get("SORDINO_TEST_BACKEND", "sordino")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    all_parts()
    dist.destroy_process_group()
    print("well", rank, flush=True)


if __name__ == "__main__":
    main()
