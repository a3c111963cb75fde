"""The CUDA kernels against the CPU's, bit for bit, and against float64; at all addresses and sizes."""

from __future__ import annotations

import numpy as np
import places
import pytest
import torch
from checks.reference import DTYPES, FLOATS, INTEGERS
from places import PHASES, SIZES, Place, assert_same, content, phase, raw

import sordino.torch as hvd
from sordino._core import cuda_kernels, kernels
from sordino.errors import UsageError
from sordino.runtime.dtypes import DTYPE_CODES

pytestmark = pytest.mark.gpu

OPS = (hvd.Sum, hvd.Min, hvd.Max, hvd.Product)


@pytest.fixture(scope="module")
def cuda():
    return cuda_kernels.CudaKernels(0)


def rows_of(count: int, lists: int, dtype: torch.dtype, kind: str, seed: int = 0) -> tuple[list[torch.Tensor], list]:
    """Return the tensors of a row, on the host and on the device."""
    host = [content(k, count, dtype, seed) for k in range(lists)]
    return host, [Place(one, phase(kind, k, dtype)) for k, one in enumerate(host)]


def addresses(tensors: list) -> list[int]:
    return [one.data_ptr() if isinstance(one, torch.Tensor) else one.address for one in tensors]


@pytest.mark.parametrize("kind", PHASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce(cuda, dtype: torch.dtype, kind: str) -> None:
    code = DTYPE_CODES[dtype]
    for op in OPS:
        for sources, targets, pre, post in ((1, 1, 1.0, 1.0), (1, 2, 1.0, 0.5), (2, 1, 1.0, 1.0), (5, 3, -1.7, 1 / 3)):
            table = [rows_of(count, sources + targets, dtype, kind, count) for count in SIZES]
            for in_place in (False, True):  # one of the sources is also a target
                rows, expected = [], []
                for host, device in table:
                    ours = addresses(device)
                    theirs = [one.clone() for one in host]
                    to = addresses(theirs)
                    if in_place:
                        ours[sources], to[sources] = ours[sources - 1], to[sources - 1]
                    rows.append((ours, host[0].numel()))
                    kernels.reduce(op, code, to[:sources], to[sources:], host[0].numel(), pre, post)
                    expected.append(theirs)
                cuda.reduce(op, code, rows, sources, pre, post)
                for (_, device), theirs in zip(table, expected):
                    for k, (ours, wanted) in enumerate(zip(device, theirs)):
                        if k != sources or not in_place:
                            assert_same(ours.take(), wanted, (op, sources, k, ours.elements, in_place))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reduce_against_float64(cuda, dtype: torch.dtype) -> None:
    host = [torch.from_numpy(np.random.default_rng(k).standard_normal(10007)).to(dtype) for k in range(4)]
    device = [Place(one) for one in host]
    cuda.reduce(hvd.Sum, DTYPE_CODES[dtype], [(addresses([*device, device[0]]), 10007)], 4, 1.0, 0.25)
    exact = sum(one.double() for one in host) / 4
    assert torch.allclose(device[0].take().double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-7)


@pytest.mark.parametrize("kind", PHASES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_axpby(cuda, dtype: torch.dtype, kind: str) -> None:
    table = [rows_of(count, 2, dtype, kind) for count in SIZES]
    cuda.axpby(DTYPE_CODES[dtype], [(addresses(device), device[0].elements) for _, device in table], -2.3, 1 / 3)
    for host, device in table:
        kernels.axpby(DTYPE_CODES[dtype], *addresses(host), host[0].numel(), -2.3, 1 / 3)
        assert_same(device[0].take(), host[0])
        assert_same(device[1].take(), host[1], host[1].numel())


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_flatten(cuda, shift: int) -> None:
    rng = np.random.default_rng(shift)
    tensors = [torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8)) for size in [*SIZES, *range(40)]]
    device = [Place(one, int(rng.integers(0, 17))) for one in tensors]
    spans = [(one.address, one.elements) for one in device]
    spans[3:3] = [(0, 0), (0, 5)]
    flat = Place(torch.zeros(sum(one.numel() for one in tensors), dtype=torch.uint8), shift)
    cuda.flatten(spans, flat.address)
    assert torch.equal(flat.take(), torch.cat(tensors))
    back = [Place(torch.zeros_like(one), int(rng.integers(0, 17))) for one in tensors]
    cuda.unflatten(flat.address, [(one.address, one.elements) for one in back])
    for one, wanted in zip(back, tensors):
        assert torch.equal(one.take(), wanted)


def mean(vectors: list[torch.Tensor], scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return `scale` times the sum in this order, by kernels.reduce."""
    result = torch.zeros_like(vectors[0])
    at = addresses(vectors)
    kernels.reduce(hvd.Sum, DTYPE_CODES[dtype], at, [result.data_ptr()], result.numel(), 1.0, scale)
    return result


@pytest.mark.parametrize("kind", PHASES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mix(cuda, dtype: torch.dtype, kind: str) -> None:
    for count in SIZES:
        host, device = rows_of(count, 4, dtype, kind)
        other = Place(torch.zeros(count, dtype=dtype), phase(kind, 1, dtype))
        outputs = [*addresses(device), other.address]
        averages = [([0, 1], [1], 0.5), ([1, 2, 0], [0, 4], 1 / 3), ([3], [2], 1.0), ([], [3], 1.0)]
        cuda.mix(DTYPE_CODES[dtype], addresses(device), outputs, averages, count)
        wanted = [[] for _ in outputs]
        for of, into, scale in averages:
            for output in into:
                zero = torch.zeros_like(host[0])
                wanted[output] = mean([host[k] for k in of], scale, dtype) if of else zero
        for k, place in enumerate([*device, other]):
            assert_same(place.take(), wanted[k], (count, k))


def test_mix_of_many(cuda) -> None:
    vectors = [torch.full((1001,), float(k)) for k in range(90)]
    device = [Place(one) for one in vectors]
    around = [([k, (k + 1) % 90], [(k + 1) % 90], 0.5) for k in range(90)]
    cuda.mix(DTYPE_CODES[torch.float32], addresses(device), addresses(device), around, 1001)
    for k, place in enumerate(device):
        assert bool((place.take() == ((k - 1) % 90 + k) / 2).all())
    with pytest.raises(UsageError, match="too many"):
        cuda.mix(DTYPE_CODES[torch.float32], addresses(device) * 3, addresses(device) * 3, around * 3, 1001)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums(cuda, dtype: torch.dtype) -> None:
    code, found = DTYPE_CODES[dtype], []
    for kind in PHASES:
        hosts = [
            torch.from_numpy(np.random.default_rng(k).standard_normal((2, n))).to(dtype) for k, n in enumerate(SIZES)
        ]
        pairs = [[Place(one, phase(kind, k, dtype)) for k, one in enumerate(host)] for host in hosts]
        rows = [(addresses(pair), pair[0].elements) for pair in pairs]
        results = Place(torch.full((5 * len(rows),), torch.nan, dtype=torch.float64))
        cuda.dots(code, rows, results.address)
        cuda.squared_distances(code, rows, results.address + 24 * len(rows))
        cuda.norms(code, [(pair[:1], count) for pair, count in rows], results.address + 32 * len(rows))
        for t, (x, y) in enumerate(host.double() for host in hosts):
            exact = (x @ x, x @ y, y @ y, (x - y) @ (x - y), (x @ x).sqrt())
            got = results.take()
            ours = (*got[3 * t : 3 * t + 3], got[3 * len(rows) + t], got[4 * len(rows) + t])
            for one, wanted in zip(ours, exact):
                assert abs(float(one - wanted)) <= 1e-12 * (1 + float(x.abs() @ y.abs() + x @ x))
        found.append(results.take())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), "the order does not depend on addresses"


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lars(cuda, dtype: torch.dtype, momentum: float, nesterov: bool) -> None:
    nesterov, counts = nesterov and momentum > 0, (1, 17, 4097)
    hosts = [torch.from_numpy(np.random.default_rng(n).standard_normal((3, n))).to(dtype) for n in counts]
    device = [[Place(one) for one in host[: 3 if momentum else 2]] for host in hosts]
    norms, rates = Place(torch.zeros(6, dtype=torch.float64)), Place(torch.zeros(3, dtype=torch.float64))
    for k in range(2):
        rows = [([row[k].address], row[0].elements) for row in device]
        cuda.norms(DTYPE_CODES[dtype], rows, norms.address + 24 * k)
    cuda.lars_rates(norms.address, norms.address + 24, bytes([1, 0, 1]), rates.address, 0.1, 0.02, 1e-3, 1e-9)
    rows = [(addresses(row), row[0].elements) for row in device]
    cuda.lars_step(DTYPE_CODES[dtype], rows, rates.address, 1e-3, momentum, nesterov)
    near = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for t, (w, g, v) in enumerate(host.double() for host in hosts):
        rate = 0.1 * (0.02 * float(w.norm()) / (float(g.norm()) + 1e-3 * float(w.norm()) + 1e-9) if t != 1 else 1)
        assert float(rates.take()[t]) == pytest.approx(rate, rel=1e-12)
        d = rate * (g + 1e-3 * w)
        v = momentum * v + d
        assert torch.allclose(device[t][0].take().double(), w - (d + momentum * v if nesterov else v), **near)
        if momentum:
            assert torch.allclose(device[t][2].take().double(), v, **near)


def test_lars_does_not_scale_by_norms_of_zero(cuda) -> None:
    norms = Place(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    rates = Place(torch.zeros(3, dtype=torch.float64))
    cuda.lars_rates(norms.address, norms.address + 24, bytes([1, 1, 1]), rates.address, 0.1, 0.02, 0.0, 0.0)
    assert rates.take().tolist() == [0.1, 0.1, 0.1]


def test_ten_thousand_tiny_tensors(cuda) -> None:
    x, y = content(0, 40000, torch.float32), content(1, 40000, torch.float32)
    device, code = [Place(x), Place(y)], DTYPE_CODES[torch.float32]
    counts = [k % 4 for k in range(10000)]
    cuda.axpby(code, [([one.address + 16 * k for one in device], n) for k, n in enumerate(counts)], 0.5, 0.5)
    for k, n in enumerate(counts):
        kernels.axpby(code, x.data_ptr() + 16 * k, y.data_ptr() + 16 * k, n, 0.5, 0.5)
    assert_same(device[1].take(), y)
    results = Place(torch.full((10000,), -1.0, dtype=torch.float64))
    ones = Place(torch.ones(40000))
    cuda.norms(code, [([ones.address + 16 * k], n) for k, n in enumerate(counts)], results.address)
    assert torch.allclose(results.take(), torch.tensor(counts).double().sqrt())


def test_on_a_stream(cuda) -> None:
    """Work is put on the given stream, after earlier work."""
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 22, device=places.DEVICE)
    with torch.cuda.stream(stream):
        for _ in range(20):
            x += 1
            cuda.reduce(
                hvd.Sum, DTYPE_CODES[x.dtype], [([x.data_ptr()] * 2, x.numel())], 1, 2.0, stream=stream.cuda_stream
            )
    stream.synchronize()
    assert bool((x == 2**21 - 2).all())


def test_what_is_refused(cuda) -> None:
    row, code = [([0, 0], 0)], DTYPE_CODES[torch.int32]
    for run in (
        lambda: cuda.axpby(code, row, 1.0, 1.0),
        lambda: cuda.dots(code, row, 0),
        lambda: cuda.norms(code, [([0], 0)], 0),
        lambda: cuda.mix(code, [0], [0], [([0], [0], 1.0)], 0),
    ):
        with pytest.raises(UsageError, match="int32 is not a floating type"):
            run()
    with pytest.raises(UsageError, match="2 addresses a row"):
        cuda.axpby(DTYPE_CODES[torch.float32], [([0], 0)], 1.0, 1.0)
    with pytest.raises(UsageError, match="operation"):
        cuda.reduce(hvd.Adasum, code, row, 1)
    with pytest.raises(UsageError, match="at least one source"):
        cuda.reduce(hvd.Sum, code, row, 0)


@pytest.mark.large
def test_more_elements_than_32_bits_count(cuda) -> None:
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < 12:
        pytest.skip(f"needs 12 GiB of device memory, and {free} are free")
    count = (1 << 31) + 12345
    a, b = (torch.zeros(count, dtype=torch.uint8, device=places.DEVICE) for _ in range(2))
    for at in (0, 1 << 20, (1 << 31) - 1, 1 << 31, count - 1):
        a[at], b[at] = 200, 100
    cuda.reduce(hvd.Sum, DTYPE_CODES[torch.uint8], [([a.data_ptr(), b.data_ptr(), a.data_ptr()], count)], 2)
    assert [int(a[at]) for at in (0, 1, 1 << 20, (1 << 31) - 1, 1 << 31, count - 1)] == [44, 0, 44, 44, 44, 44]
    assert int(a.sum(dtype=torch.int64)) == 5 * 44
    del a, b
    ones = torch.ones(count, dtype=torch.bfloat16, device=places.DEVICE)
    result = Place(torch.zeros(1, dtype=torch.float64))
    cuda.norms(DTYPE_CODES[ones.dtype], [([ones.data_ptr()], count)], result.address)
    assert float(result.take()[0]) == pytest.approx(count**0.5, rel=1e-12)


def test_integers_scale_as_on_the_cpu(cuda) -> None:
    for dtype in INTEGERS:
        host = content(0, 1000, dtype)
        device = Place(host)
        for factor in (-3.0, 1e19, 1 / 3):
            cuda.reduce(hvd.Sum, DTYPE_CODES[dtype], [([device.address] * 2, 1000)], 1, factor)
            kernels.scale(DTYPE_CODES[dtype], host.data_ptr(), 1000, factor)
            assert torch.equal(raw(device.take()), raw(host)), (dtype, factor)
