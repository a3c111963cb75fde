"""torch's own tests of its backends, `DistributedTest` in `torch.testing._internal`, made to run with "sordino".

torch decides when its module is imported which tests a backend runs, by the backend's name. So the module is imported
as for gloo, and, if it is needed, once more as for MPI, which alone has the tests of all_to_all. In both copies the
tests then use "sordino". Tests that need a GPU are known as such beforehand, without starting a group for them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import unittest
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

BACKEND = "sordino"
TIMEOUT_S = 60
SIZE = 4  # ranks, as in torch's own runs
_COPIES = ("gloo", "mpi")
_MODULE = "torch.testing._internal.distributed.distributed_test"
_CHOOSES_MODEL = "test_accumulate_gradients"  # these tests know which model to make by the names of three backends


def _needs_gpus(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return unittest.skip("needs GPUs")


def _any_size(test: Any) -> Any:
    return test


def _import(backend: str) -> ModuleType:
    """Return a copy of torch's module, with the tests of a backend."""
    os.environ |= {"BACKEND": backend, "INIT_METHOD": "file:///not-used"}
    os.environ.setdefault("WORLD_SIZE", str(SIZE))
    spec = importlib.util.find_spec(_MODULE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # as an import does
    spec.loader.exec_module(module)
    return module


def _prepare() -> None:
    """Replace decorators of torch's tests: those for GPUs, and one that skips small worlds, which suffice here."""
    tables: Any = common_distributed
    if not torch.cuda.is_available():
        tables.skip_if_no_gpu = unittest.skip("needs GPUs")
        tables.skip_if_lt_x_gpu = _needs_gpus
    tables.skip_if_small_worldsize = _any_size
    for feature in ("ddp", "subgroup", "plugin"):
        tables.DistTestCases.backend_feature[feature].add(BACKEND)


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Call the group's monitored barrier. torch's function refuses all backends but gloo."""
    group = dist.group.WORLD if group is None else group
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        group.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)


@cache
def _suite_of(backend: str) -> Any:
    """Return the class with the tests of a copy of torch's module."""
    copy = _import(backend)

    class Suite(copy.TestDistBackend, copy.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        """The tests of one copy."""

        module = copy

    sys.modules[_MODULE] = _suite_of("gloo").module if backend != "gloo" else copy  # by this name, pickle finds classes
    os.environ["BACKEND"] = "gloo"  # some tests read it, to choose between GPU and CPU
    return Suite


_prepare()
dist.monitored_barrier = _monitored_barrier  # type: ignore[attr-defined]


def names() -> list[str]:
    """Return the names of all tests."""
    return unittest.TestLoader().getTestCaseNames(_suite_of("gloo"))  # type: ignore[return-value]


def static_skip(name: str) -> str:
    """Return the reason why a test does not run on this machine; "" if it may run."""
    reasons = [_reason(_suite_of(backend), name) for backend in _COPIES]
    return "" if "" in reasons else reasons[0]


def _reason(suite: Any, name: str) -> str:
    test = getattr(suite, name)
    return getattr(test, "__unittest_skip_why__", "") if getattr(test, "__unittest_skip__", False) else ""


def skip_reason(code: Any) -> str:
    """Return the reason for which a test was skipped, by the exit code of torch; "" if the code is no skip."""
    return next((skip.message for skip in common_distributed.TEST_SKIPS.values() if skip.exit_code == code), "")


def made(name: str, rank: int, folder: str) -> tuple[Any, Any]:
    """Return a test, ready to be called on this rank, and its copy of the module."""
    suite = next(suite for suite in map(_suite_of, _COPIES) if not _reason(suite, name))
    copy = suite.module
    copy.INIT_METHOD = f"file://{folder}/another_store"
    copy.Barrier.barrier_id = 0
    copy.BACKEND = "gloo" if name.startswith(_CHOOSES_MODEL) else BACKEND
    test = suite(name)
    test.rank, test.file_name = rank, f"{folder}/store"
    return test, copy


__all__ = ["BACKEND", "SIZE", "TIMEOUT_S", "common_utils", "made", "names", "skip_reason", "static_skip"]
