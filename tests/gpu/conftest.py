"""Skip tests that need a GPU, visibly, on a machine without one, or if the core was built without CUDA."""

from __future__ import annotations

import pytest
import torch

from sordino._core import build_info


def _obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None if build_info()["cuda"] else "no CUDA device that the core could use: it was built without CUDA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    obstacle = _obstacle()
    for item in items:
        if obstacle is not None and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=obstacle))
