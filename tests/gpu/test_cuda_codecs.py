"""The codecs' CUDA kernels against the CPU's, bit for bit, and encoded means of GPU tensors against the host's."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import places
import pytest
import torch
from places import Place, assert_same

from sordino._core import cuda_kernels, kernels
from sordino.codecs import BFloat16, FlatCodec, Int4, Int8, Sign, TopK, TwoBit
from sordino.runtime.devices import core_device
from sordino.runtime.exchange.compressed_mean import CompressedMean

pytestmark = pytest.mark.gpu

BLOCKS = (32, 64, 128, 1024, 16384)
KEPT = ((32, 1), (32, 32), (128, 13), (512, 100), (4096, 64), (4096, 1000), (16384, 16384), (16384, 700))
CODECS = [kernels.Codec(code, block) for code in ("int8", "int4", "two_bit", "sign") for block in BLOCKS]
SPARSE = [kernels.Codec(code, block, kept) for code in ("top", "top_exact") for block, kept in KEPT]
NAMES = [f"{code}-{block}" for code in ("int8", "int4", "two_bit", "sign") for block in BLOCKS]
SPARSE_NAMES = [f"{code}-{kept}-of-{block}" for code in ("top", "top_exact") for block, kept in KEPT]
EDGES = (0.0, -0.0, 1e-45, -1e-40, 1.17549435e-38, 7.8886e-31, -1e-6, 1.0, 65504.0)


def chosen(values: tuple[float, ...], count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]


def some_infinite(count: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(count, generator=generator)
    places = torch.rand(count, generator=generator) < 1 / 500
    values[places] = chosen((math.nan, math.inf, -math.inf), int(places.sum()), generator)
    return values


CONTENTS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "ordinary": lambda count, generator: torch.randn(count, generator=generator),
    "few magnitudes": lambda count, generator: chosen((-2.0, -1.0, 0.0, 1.0, 2.0), count, generator),
    "edges": lambda count, generator: chosen(EDGES, count, generator),
    "tiny": lambda count, generator: torch.randn(count, generator=generator) * 1e-40,
    "huge": lambda count, generator: (torch.rand(count, generator=generator) * 2 - 1) * 3.4028e38,
    "zeros": lambda count, _: torch.zeros(count),
    "some infinite": some_infinite,
}


@pytest.fixture(scope="module")
def cuda():
    return cuda_kernels.CudaKernels(0)


def compare(cuda, codec: kernels.Codec, values: torch.Tensor, shift: int) -> None:
    """Encode and decode values on both devices. On the GPU, floats begin `shift` floats after a multiple of 64 bytes,
    and encoded bytes `shift` bytes."""
    count = values.numel()
    generator = torch.Generator().manual_seed(count)
    total, given = torch.randn(count, generator=generator), torch.ones(count)
    encoded = torch.zeros(codec.bytes(count), dtype=torch.uint8)
    infinite = codec.encode(values.data_ptr(), count, encoded.data_ptr())
    there = (
        Place(values, 4 * shift),
        Place(torch.zeros_like(encoded), shift),
        Place(torch.tensor([5], dtype=torch.int32)),
    )
    cuda.encode(codec, there[0].address, count, there[1].address, there[2].address)
    assert torch.equal(there[1].take(), encoded)
    assert int(there[2].take()) == 5 + infinite
    for weight, add, counts in ((1.0, False, False), (-1.0, True, False), (1 / 3, True, True), (0.5, False, True)):
        wanted, counted = total.clone(), given.clone()
        codec.decode(encoded.data_ptr(), count, wanted.data_ptr(), weight, add, counted.data_ptr() if counts else 0)
        ours, ours_counted = Place(total, 4 * (shift % 7)), Place(given, 4 * (shift % 3))
        place = ours_counted.address if counts else 0
        cuda.decode(codec, there[1].address, count, ours.address, weight, add, place)
        assert_same(ours.take(), wanted, (count, weight, add))
        assert_same(ours_counted.take(), counted)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("codec", [*CODECS, *SPARSE], ids=[*NAMES, *SPARSE_NAMES])
def test_bits_are_those_of_the_cpu(cuda, codec: kernels.Codec, content: str) -> None:
    name = [*NAMES, *SPARSE_NAMES][[*CODECS, *SPARSE].index(codec)]
    block = int(name.rsplit("-", 1)[1])
    counts = [0, 1, block - 1, block, block + 1, 3 * block + 17]
    if content == "ordinary":
        counts.append((1 << 20) + 77)
    for shift, count in enumerate(counts):
        generator = torch.Generator().manual_seed(count)
        compare(cuda, codec, CONTENTS[content](count, generator), shift)


@pytest.mark.parametrize("code", ["top", "top_exact"])
def test_positions_beyond_the_end_are_left_out(cuda, code: str) -> None:
    codec = kernels.Codec(code, 32, 16)
    encoded = Place(torch.full((codec.bytes(5),), 0xFF, dtype=torch.uint8), 3)
    values = Place(torch.ones(5))
    cuda.decode(codec, encoded.address, 5, values.address, 1.0, True)
    assert torch.equal(values.take(), torch.ones(5))


class Echo:
    """Transfers of one process that stands for 3 ranks with the same values."""

    size, place = 3, 0

    def all_to_all(self, sent: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: sent.chunk(3)[0].repeat(3)

    def all_gather(self, sent: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: sent.repeat(3)

    def all_reduce(self, sent: torch.Tensor, part: str) -> Callable[[], torch.Tensor]:
        raise AssertionError("codecs of flat values reduce nothing")


@pytest.mark.parametrize("kept", [1.0, 0.95])
@pytest.mark.parametrize(
    "codec", [Int8(), Int4(32), TwoBit(), Sign(64), TopK(), TopK(0.1, 128, contributors=True), BFloat16()], ids=repr
)
def test_means_have_the_bits_of_the_host(codec: FlatCodec, kept: float) -> None:
    device = torch.device(places.DEVICE, 0) if places.DEVICE == "cuda" else torch.device(places.DEVICE)
    for count in (1, 5000, 100_003):
        here = CompressedMean(count, codec, "here", Echo(), kept)
        there = CompressedMean(count, codec, "there", Echo(), kept, device)
        generator = torch.Generator().manual_seed(count)
        for turn in range(4):
            values = torch.randn(count, generator=generator)
            if turn == 2:
                values[count // 2] = math.nan
            found = []
            for mean, at in ((here, torch.device("cpu")), (there, device)):
                mean.begin(values.to(at))
                found.append(mean.finish().cpu().clone())
                with pytest.warns(RuntimeWarning, match=r"\b1 (block|value)\b") if turn == 2 else nullcontext():
                    mean.report()
            assert_same(found[1], found[0], (count, turn))
            for one, other in zip(there.residuals, here.residuals, strict=True):
                assert one.device == device
                assert torch.equal(one.cpu(), other)


def test_a_mean_does_not_wait_for_the_gpu() -> None:
    """Work that keeps the GPU busy is still there when `finish` returns."""
    if places.DEVICE != "cuda":
        pytest.skip("needs a GPU that works while the host goes on")
    device = torch.device("cuda", 0)
    assert core_device(device) is not None
    mean = CompressedMean(100_000, Int8(), "busy", Echo(), 1.0, device)
    values = torch.randn(100_000, device=device)
    mean.begin(values)
    mean.finish()
    mean.report()
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    busy.record()
    mean.begin(values)
    assert not busy.query(), "begin waited"
    mean.finish()
    assert not busy.query(), "finish waited"
    mean.report()
    assert busy.query(), "report did not wait"
