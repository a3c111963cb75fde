"""Means of encoded values: their warnings and errors, and the device whose kernels they use."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from sordino import sim
from sordino._core import sim_device
from sordino.algorithms.diloco import mean as outer_mean
from sordino.codecs import BFloat16, FlatCodec, Float16, Int8, Sign, TopK
from sordino.distributed import hooks
from sordino.errors import NotBuilt, UsageError
from sordino.runtime.exchange import compressed_mean
from sordino.runtime.exchange.block_count import BlockCount
from sordino.runtime.exchange.compressed_mean import CompressedMean
from sordino.runtime.exchange.low_rank_mean import LowRankMean


class Echo:
    """Transfers of one process that stands for 2 ranks with the same values."""

    size, place = 2, 0

    def all_to_all(self, sent: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: sent.chunk(2)[0].repeat(2)

    def all_gather(self, sent: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: sent.repeat(2)

    def all_reduce(self, sent: torch.Tensor, part: str) -> Callable[[], torch.Tensor]:
        raise AssertionError("codecs of flat values reduce nothing")


@pytest.mark.parametrize("codec", [Int8(32), Sign(32), TopK(0.25, 32)], ids=repr)
def test_only_the_step_with_a_nan_warns(codec: FlatCodec) -> None:
    mean = CompressedMean(100, codec, "gradients", Echo())
    values = torch.randn(100, generator=torch.Generator().manual_seed(1))
    for bad in (0, 2, 0, 1, 0):
        given = values.clone()
        given[: 32 * bad : 32] = math.nan
        mean.begin(given)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert bool(mean.finish().isfinite().all()) == (not bad)
        if bad:
            with pytest.warns(RuntimeWarning, match=f"gradients: {bad} blocks? of 32 values"):
                mean.report()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mean.report()


@pytest.mark.parametrize(
    ("codec", "values", "text"),
    [
        (Float16(), (1e6,), "gradients: 1 value of this rank is not finite in float16, so"),
        (Float16(), (1e6, -1e5, math.nan), "gradients: 3 values of this rank are not finite in float16, so"),
        (BFloat16(), (math.inf, 3.4e38), "gradients: 2 values of this rank are not finite in bfloat16, so"),
        (Int8(32), (math.inf,), "gradients: 1 block of 32 values of this rank has a NaN or an infinity, so"),
        (
            Int8(32),
            (math.inf, 1e6, math.nan),
            "gradients: 2 blocks of 32 values of this rank have a NaN or an infinity",
        ),
    ],
)
def test_what_is_not_finite_is_counted(codec: FlatCodec, values: tuple[float, ...], text: str) -> None:
    mean = CompressedMean(200, codec, "gradients", Echo())
    given = torch.ones(200)
    given[: 32 * len(values) : 32] = torch.tensor(values)
    mean.begin(given)
    mean.finish()
    with pytest.warns(RuntimeWarning, match=text):
        mean.report()


def test_what_was_not_reported_is_warned_of_by_the_next_mean() -> None:
    mean = CompressedMean(64, Int8(32), "gradients", Echo())
    mean.begin(torch.full((64,), math.nan))
    mean.finish()
    with pytest.warns(RuntimeWarning, match="gradients: 2 blocks of 32 values"):
        mean.begin(torch.zeros(64))


class Many(Echo):
    """Transfers of one process that stands for any number of ranks. They measure the received bytes that are held."""

    def __init__(self, size: int) -> None:
        self.size, self.place, self.most = size, 0, 0  # most: in bytes
        self._held: list[weakref.ref[torch.Tensor]] = []

    def all_to_all(self, sent: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: self._arrive(sent.chunk(self.size)[0].repeat(self.size), 0)

    def all_gather(self, sent: torch.Tensor) -> Callable[[], torch.Tensor]:
        sent_besides = sent.numel() if self._held else 0  # the first sent buffer is a tensor of the mean
        return lambda: self._arrive(sent.repeat(self.size), sent_besides)

    def _arrive(self, received: torch.Tensor, sent: int) -> torch.Tensor:
        self._held.append(weakref.ref(received))
        held = [one() for one in self._held]
        self.most = max(self.most, sent + sum(one.numel() for one in held if one is not None))
        return received


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(
    ("codec", "formula"),
    [
        (Int8(), lambda n, b: (4 + 4 / n + b, b * (1 + 1 / n))),
        (Float16(), lambda n, b: (4 + 4 / n + b, b * (1 + 1 / n))),
        (Sign(), lambda n, b: (8 + 8 / n + b, b * (1 + 1 / n))),
        (TopK(), lambda n, b: (8 + b, n * b)),
        (TopK(contributors=True), lambda n, b: (12 + b, n * b)),
    ],
    ids=["Int8", "Float16", "Sign", "TopK", "contributors"],
)
def test_memory_is_that_of_the_page(
    codec: FlatCodec, formula: Callable[[int, float], tuple[float, float]], size: int
) -> None:
    """The table is in docs/compression.md, under "On GPUs"."""
    count, transfers = 1 << 20, Many(size)
    mean = CompressedMean(count, codec, "gradients", transfers)
    mean.begin(torch.ones(count))
    mean.finish()
    tensors = [one for one in vars(mean).values() if isinstance(one, torch.Tensor)] + mean.residuals
    kept = sum(one.numel() * one.itemsize for one in tensors)
    assert (kept / count, transfers.most / count) == pytest.approx(formula(size, codec.bytes(count) / count), abs=1e-3)


class Reductions:
    """Recorder of the order in which encoded means begin and their counts are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        begin, run, read = CompressedMean.begin, LowRankMean.run, BlockCount.read

        def noted(event: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any) -> Any:
                self.order.append(event)
                return method(*given)

            return call

        monkeypatch.setattr(CompressedMean, "begin", noted("begin", begin))
        monkeypatch.setattr(LowRankMean, "run", noted("begin", run))
        monkeypatch.setattr(BlockCount, "read", noted("read", read))

    def check(self, means: int) -> None:
        """Check that all means begin before the first read, so that none waits for the encoding of an earlier one."""
        assert self.order == ["begin"] * means + ["read"] * means
        self.order.clear()


@pytest.mark.parametrize("compression", ["int8", "PowerSGD(rank=1)"])
def test_buckets_of_an_optimizer_are_reported_when_all_are_sent(
    compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        parameters = [torch.nn.Parameter(torch.zeros(40, 10)) for _ in range(3)]
        wrapped = torch.optim.SGD(parameters, lr=0.1)
        optimizer = hvd.DistributedOptimizer(wrapped, compression=compression, groups=3)
        for step in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            if step == 1 and hvd.rank() == 0:
                parameters[1].grad[3, 4] = math.nan  # type: ignore[index]
            optimizer.step()

    reductions = Reductions(monkeypatch)
    with pytest.warns(RuntimeWarning, match="NaN or an infinity") as warned:
        sim.run(2, train)
    assert len([one for one in warned if "of this rank" in str(one.message)]) == 1
    # Two ranks share the list. The reads of a step come after its 3 begins on each of them.
    order = reductions.order
    assert order.count("begin") == order.count("read") == 12
    assert order[:3] == ["begin"] * 3 and order[-3:] == ["read"] * 3


class OneBucket:
    """Bucket of DistributedDataParallel with one parameter."""

    def __init__(self, number: int, last: bool, value: float) -> None:
        self._number, self._last, self._values = number, last, torch.full((40, 10), value)
        self._parameters = [torch.nn.Parameter(torch.zeros(40, 10))]

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._last

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        return [self._values]

    def buffer(self) -> torch.Tensor:
        return self._values.view(-1)


def test_buckets_of_ddp_are_reported_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    reductions = Reductions(monkeypatch)
    monkeypatch.setattr(hooks, "_GroupTransfers", lambda group: Echo())
    state = hooks.Encoded("int8")
    *first, last = OneBucket(0, False, 1.0), OneBucket(1, False, math.nan), OneBucket(2, True, 1.0)
    for bucket in first:
        state.start(bucket)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="bucket 1 of DistributedDataParallel: 4 blocks"):
        state.start(last)  # type: ignore[arg-type]
    reductions.check(3)


def test_the_tensors_of_an_outer_step_are_reported_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reductions = Reductions(monkeypatch)
    monkeypatch.setattr(outer_mean, "SetTransfers", lambda name, process_set: Echo())
    mean = outer_mean.EncodedMean(hvd.global_process_set, [torch.zeros(8), torch.zeros(5)], "outer", Int8(), 1.0)
    mean.begin([torch.zeros(8), torch.full((5,), math.nan)])
    with pytest.warns(RuntimeWarning, match=r"outer\.1: 1 block"):
        mean.finish()
    reductions.check(2)


@pytest.mark.parametrize("codec", [Int8(), TopK()], ids=repr)
def test_the_kernels_are_those_of_the_device(codec: FlatCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand for the memory of a simulated device."""
    device, used = sim_device(0), []

    class Noted:
        def encode(self, *given: object) -> None:
            used.append("encode")
            device.encode(*given)  # type: ignore[arg-type]

        def decode(self, *given: object) -> None:
            used.append("decode")
            device.decode(*given)  # type: ignore[arg-type]

    values = torch.randn(5000, generator=torch.Generator().manual_seed(2))
    wanted = CompressedMean(5000, codec, "on the host", Echo())
    wanted.begin(values)
    assert not used
    monkeypatch.setattr(compressed_mean, "core_device", lambda device: Noted())
    mean = CompressedMean(5000, codec, "on the device", Echo())
    mean.begin(values)
    assert used == ["encode"]
    assert torch.equal(mean.finish(), wanted.finish())
    assert used.count("decode") > 1


def no_kernels(device: torch.device) -> None:
    raise NotBuilt(f"no kernels for {device}")


def test_only_what_the_core_encodes_needs_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_mean, "core_device", no_kernels)
    with pytest.raises(NotBuilt, match="no kernels for cpu"):
        CompressedMean(4, Int8(), "gradients", Echo())
    for codec, transfers in ((Float16(), Echo()), (BFloat16(), Echo()), (Sign(), Many(1))):
        mean = CompressedMean(4, codec, "gradients", transfers)
        mean.begin(torch.full((4,), 1.5))
        assert torch.equal(mean.finish(), torch.full((4,), 1.5))


class Elsewhere(torch.Tensor):
    """CPU tensor that stands for one of a device that the core does not know."""

    device = torch.device("xpu", 0)


@pytest.mark.parametrize("codec", [Int8(32), Sign(32), TopK(0.25, 32), BFloat16()], ids=repr)
def test_values_of_other_devices_are_encoded_on_the_cpu(codec: FlatCodec) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(3))
    here = CompressedMean(100, codec, "gradients", Echo())
    there = CompressedMean(100, codec, "gradients", Echo(), device=Elsewhere.device)
    for _ in range(2):
        here.begin(values)
        there.begin(values.as_subclass(Elsewhere))
        found = there.finish()
        assert found.device.type == "cpu" and torch.equal(found, here.finish())
    assert all(one.device.type == "cpu" for one in there.residuals)
    with pytest.raises(UsageError, match=r"on cpu, and must be .* on xpu:0"):
        there.begin(values)


def test_values_that_do_not_fit() -> None:
    mean = CompressedMean(10, Int8(), "gradients", Echo())
    for values in (torch.zeros(9), torch.zeros(10).double(), torch.zeros(20)[::2], torch.zeros(10, device="meta")):
        with pytest.raises(UsageError, match=r"must be contiguous float32 \(10,\) on cpu"):
            mean.begin(values)
