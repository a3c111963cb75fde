"""Means of encoded values: what they warn of and refuse, and whose kernels they use."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch

from sordino._core import sim_device
from sordino.codecs import FlatCodec, Int8, Sign, TopK
from sordino.errors import UsageError
from sordino.runtime.exchange import compressed_mean
from sordino.runtime.exchange.compressed_mean import CompressedMean


class Echo:
    """Transfers of one process that stands for 2 ranks with the same values."""

    size = 2

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
        if bad:
            with pytest.warns(RuntimeWarning, match=f"gradients: {bad} blocks? of 32 values"):
                mean.finish()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert bool(mean.finish().isfinite().all())


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


def test_values_that_do_not_fit() -> None:
    mean = CompressedMean(10, Int8(), "gradients", Echo())
    for values in (torch.zeros(9), torch.zeros(10).double(), torch.zeros(20)[::2], torch.zeros(10, device="meta")):
        with pytest.raises(UsageError, match=r"must be contiguous float32 \(10,\) on cpu"):
            mean.begin(values)
