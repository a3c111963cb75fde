"""Older versions of torch, without DLPack's table of C functions: results are the same."""

from __future__ import annotations

import pytest
import torch
from checks.reference import DTYPES, assert_equal

import sordino.torch as hvd
from sordino import sim
from sordino.errors import NotBuilt
from sordino.runtime.context import current

TABLE = "__dlpack_c_exchange_api__"


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_tensors_of_all_kinds(table: bool, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not table:
        monkeypatch.delattr(torch.Tensor, TABLE, raising=False)

    def on_each_rank() -> None:
        for dtype in DTYPES:
            for shape in ((), (0,), (3,), (2, 3), (1, 1, 2)):
                for _ in range(3):
                    mine = torch.ones(shape, dtype=dtype)
                    result = hvd.allreduce(mine, op=hvd.Max, name=f"{dtype}.{shape}")
                    assert_equal(result, mine)
                    assert result.shape == mine.shape
                    assert result.data_ptr() != mine.data_ptr() or not mine.numel()
        whole = torch.arange(12.0).view(3, 4)
        for _ in range(3):
            assert_equal(hvd.allreduce(whole.t(), name="turned"), whole.t())
            assert_equal(hvd.allreduce(whole[1:], name="part"), whole[1:])
            assert_equal(hvd.allreduce(whole[:, 1:2], name="column"), whole[:, 1:2])
            negated = torch.complex(whole, whole).conj().imag
            assert negated.is_neg()
            assert_equal(hvd.allreduce(negated, name="negated"), -whole)
            with pytest.raises(NotBuilt):
                hvd.allreduce(torch.empty(2, device="meta"), name="meta")
            turned = hvd.alltoall(torch.arange(float(size * 2)), name="t")
            rank = hvd.rank()
            assert_equal(turned, torch.arange(2.0 * rank, 2.0 * rank + 2).repeat(size))
        assert current().repeat(99, True, None, None, "x", 0) is None

    sim.run(size, on_each_rank)
