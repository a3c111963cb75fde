"""Calls that are slightly wrong: a second init(), a model instead of its parameters, a misspelt setting."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Any

import forked
import pytest
import torch
from pace import HANG_S

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import AllReduce, Crossover, LocalSGD
from sordino.errors import UsageError

SCRIPT = """
import sys, tempfile, pathlib
import sordino.torch as hvd
from sordino.algorithms import AllReduce, Layered

def refused(**arguments):
    try:
        hvd.init(**arguments)
    except hvd.UsageError as error:
        assert "has already been initialized" in str(error), error
        return True
    return False

folder = tempfile.mkdtemp()
first = {"comm": [0], "record": folder}
hvd.init(**first)
assert not refused()
assert not refused(**first)
assert not refused(record=pathlib.Path(folder))
assert not refused(process_sets="dynamic", on_peer_lost="raise", algorithm=AllReduce())
assert refused(on_peer_lost="continue")
assert refused(process_sets=[hvd.ProcessSet([0])])
assert refused(record=folder + "x")
assert refused(comm=[0, 1])
assert refused(algorithm=Layered(communicator="rank"))
assert refused(store=object(), rank=0, world_size=1)
assert hvd.size() == 1
hvd.shutdown()
hvd.init()
assert not refused(process_sets="dynamic")
"""


def test_a_second_init_takes_the_same_arguments() -> None:
    done = subprocess.run([*forked.python(), "-c", SCRIPT], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("named", [torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)), 3])
def test_a_model_is_not_its_named_parameters(named: Any) -> None:
    def job() -> None:
        sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        with pytest.raises(UsageError, match=r"expected \(name, parameter\) pairs, usually model.named_parameters\(\)"):
            hvd.DistributedOptimizer(sgd, named_parameters=named)

    sim.run(1, job)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalSGD(intervall=8), r"LocalSGD has no setting 'intervall'; it has: .*; did you mean interval\?"),
        (lambda: Crossover(group=2), r"Crossover has no setting 'group'; it has: .*group_size"),
        (
            lambda: AllReduce(**{"banana": 1}),
            r"AllReduce has no setting 'banana'; it has: bucket_bytes, double_buffering$",
        ),
    ],
)
def test_a_misspelt_setting_is_recognised(make: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make()


def test_an_algorithm_of_ones_own_may_take_any_setting() -> None:
    @dataclass(frozen=True, init=False)
    class Free(AllReduce):
        def __init__(self, **settings: int) -> None:
            super().__init__(**{"bucket_bytes": settings.get("size", 1)})

    assert Free(size=7).bucket_bytes == 7
