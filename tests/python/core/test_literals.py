"""Text with settings is read by several threads at once, as by ranks that are threads."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sordino.codecs import Int8, PowerSGD, codec_of
from sordino.literals import literal


@pytest.fixture
def switching() -> Iterator[None]:
    """Let threads switch in the middle of everything: the garbage collector runs Python code again and again."""

    def busy(phase: str, info: object) -> None:
        sum(range(50))

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(busy)
    gc.set_threshold(1)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)
    gc.callbacks.remove(busy)


@pytest.mark.usefixtures("switching")
def test_threads_read_settings_at_once() -> None:
    def read(turn: int) -> None:
        for _ in range(20):
            assert codec_of("PowerSGD(rank=3)", "compression") == PowerSGD(rank=3)
            assert codec_of("Int8(block=64)", "compression") == Int8(block=64)
            assert literal(" (1, [2.5, {'a': None}])") == (1, [2.5, {"a": None}])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
