"""Ranks do not fit together: other shapes and dtypes, missing tensors, NaN, other settings, another version.

Every rank soon names the values of each rank, and the job leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from launched import Launched, Started
from pace import bound, stretched

import sordino
from sordino.launcher import mpi

WORKER = Path(__file__).with_name("mismatch_worker.py")
RANKS = 3
OTHERS = {0: "ranks 1-2", 1: "ranks 0, 2", 2: "ranks 0-1"}
TIMEOUT_S = 3
HEARS_WITHIN_S = 0.25  # on an idle machine

Attempts = list[list[dict[str, Any]]]  # by rank
Drill = Callable[[str, int], dict[str, Attempts]]
WITHIN = "mismatches,settings,not finite,missing tensor"  # cases of one job; the last one ends its world


@pytest.fixture(scope="module")
def timeout_s() -> float:
    """Return the seconds for which a job waits for a rank: on a busy machine, a slow rank must not count as missing."""
    return stretched(TIMEOUT_S)


@pytest.fixture(scope="module")
def drill(
    launcher: mpi.Launcher,
    tmp_path_factory: pytest.TempPathFactory,
    note_time: Callable[[str, float], None],
    timeout_s: float,
) -> Drill:
    """Return a function that runs a job of some cases to its end, once, and returns what its ranks noted."""
    if launcher.family != "openmpi":
        pytest.skip("written for Open MPI's launcher")
    known: dict[tuple[str, int], dict[str, Attempts]] = {}

    def run(cases: str, odd: int) -> dict[str, Attempts]:
        if (cases, odd) not in known:
            known[cases, odd] = run_job(launcher, tmp_path_factory.mktemp("drill"), cases, odd, timeout_s)
            for case in {"mismatches", "settings", "not finite"} & known[cases, odd].keys():
                for report in known[cases, odd][case]:
                    for told in report:
                        note_time(f"ranks that differ: {case}", told["seconds"])
        return known[cases, odd]

    return run


def run_job(launcher: mpi.Launcher, folder: Path, cases: str, odd: int, timeout_s: float) -> dict[str, Attempts]:
    if cases == "version":
        make_another_version(folder)
    python = [sys.executable] if cases == "version" else forked.python()  # a fork has already imported this version
    command = mpi.command_line(launcher, mpi.Job(RANKS, [*python, str(WORKER), str(folder), cases, str(odd)]))
    variables = {"SORDINO_TIMEOUT_S": str(timeout_s), "SORDINO_STALL_WARN_S": str(timeout_s / 3)}
    reports = [folder / f"report.{rank}" for rank in range(RANKS)]
    with Started(folder, command, variables) as job:
        job.wait_for(lambda: all(file.exists() for file in reports))
        job.ends()
        job.leaves_nothing()
    told = [json.loads(file.read_text()) for file in reports]
    return {case: [one[case] for one in told] for case in cases.split(",")}


def everywhere(attempts: Attempts, number: int, label: str, kind: str, expected_s: float = HEARS_WITHIN_S) -> str:
    """Assert that an attempt ended with this kind of error and one text on all ranks, and that their world works.
    Return the text."""
    told = [report[number] for report in attempts]
    seconds = sorted(one["seconds"] for one in told)
    how_long = f"median {statistics.median(seconds):.4f} s, worst {seconds[-1]:.4f} s"
    assert [one["label"] for one in told] == [label] * RANKS
    assert [one["kind"] for one in told] == [kind] * RANKS, f"{told} ({how_long})"
    assert len({one["text"] for one in told}) == 1, told
    assert seconds[-1] < bound(expected_s), f"{label}: {how_long}"
    assert all(one.get("sum", 3.0) == 3.0 for one in told), "the world does not work"
    return str(told[0]["text"])


@pytest.mark.drill("mismatches")
@pytest.mark.parametrize("odd", (0, 2))
def test_mismatches(drill: Drill, odd: int) -> None:
    attempts = drill(WITHIN, odd)["mismatches"]
    for number, (label, words) in enumerate(
        {
            "shape": ("'allreduce.gradient'", "[1000]", "[1001]"),
            "dtype": ("'allgather.rows'", "float16", "float32"),
            "group": ("number of tensors", "2", "3"),
        }.items()
    ):
        text = everywhere(attempts, number, label, "OperationMismatch")
        assert all(word in text for word in words) and f"rank {odd}" in text, text
    for number, (label, here, there) in enumerate(
        (
            ("model shape", "0.weight float32 [7, 4]", "0.weight float32 [6, 4]"),
            ("model dtype", "0.weight float64 [6, 4]", "0.weight float32 [6, 4]"),
            ("missing parameter", "nothing", "1.weight float32 [3, 6]"),
            ("parameter order", "1.bias float32 [3]", "0.weight float32 [6, 4]"),
        ),
        start=3,
    ):
        text = everywhere(attempts, number, label, "LayoutMismatch")
        assert f"'{here}' on rank {odd}" in text and f"'{there}' on {OTHERS[odd]}" in text, text
    everywhere(attempts, 7, "order", "nothing")


@pytest.mark.drill("a missing tensor")
@pytest.mark.parametrize("odd", (0, 2))
def test_a_missing_tensor(drill: Drill, timeout_s: float, odd: int) -> None:
    attempts = drill(WITHIN, odd)["missing tensor"]
    for rank, (told,) in enumerate(attempts):
        assert told["kind"] == "Timeout", told
        assert "allreduce.left" in told["operation"] or "allreduce.right" in told["operation"], told
        waiting_for = [other for other in range(RANKS) if (other == odd) == told["operation"].endswith("right")]
        assert told["missing"] == waiting_for, (rank, told)
        assert told["seconds"] < bound(HEARS_WITHIN_S, timeout_s + 2), f"{told['seconds']:.2f} s"
    # Ranks that came later waited for less long.
    assert max(told["seconds"] for (told,) in attempts) >= timeout_s - 0.5


@pytest.mark.drill("NaN")
@pytest.mark.parametrize("odd", (0, 2))
def test_nan_on_one_rank(drill: Drill, odd: int) -> None:
    attempts = drill(WITHIN, odd)["not finite"]
    for number, label in enumerate(("AllReduce", "Crossover", "LocalSGD", "Layered", "CaPS")):
        text = everywhere(attempts, number, label, "NonFinite")
        assert f"rank {odd} has NaN in '1.weight'" in text, text
        for report in attempts:
            told = report[number]
            assert told["tensors"] == {str(odd): {"1.weight": "NaN"}}
            assert told["intact"] and told["went on"], told


@pytest.mark.drill("other settings")
@pytest.mark.parametrize("odd", (0, 2))
def test_other_settings(drill: Drill, odd: int) -> None:
    attempts = drill(WITHIN, odd)["settings"]
    for number, (label, mine, others) in enumerate(
        (
            ("seed", "Crossover(seed=2)", "Crossover(seed=1)"),
            ("algorithm", "LocalSGD", "AllReduce"),
            ("passes", "backward_passes_per_step=3", "backward_passes_per_step=1"),
            ("compression", "compression=FP16Compressor", "compression=NoneCompressor"),
        )
    ):
        text = everywhere(attempts, number, label, "ConfigurationMismatch")
        assert f"rank {odd} has {mine}" in text and f"{OTHERS[odd]} have {others}" in text, text


DRIFT = {
    "SORDINO_CHUNK_BYTES=65536": "SORDINO_CHUNK_BYTES=262144",
    "SORDINO_FUSION_BYTES=0": "SORDINO_FUSION_BYTES=67108864",
    "SORDINO_GPU_ROUTE=host": "SORDINO_GPU_ROUTE=''",
    "SORDINO_RANKS_PER_NODE=1": "SORDINO_RANKS_PER_NODE=0",
    "SORDINO_SHARED_MEMORY=0": "SORDINO_SHARED_MEMORY=1",
}
MAY_DIFFER = ("SORDINO_SPIN_US=0", "SORDINO_CPU_LEVEL=baseline", "SORDINO_TIMEOUT_S=4")
START_OF_MPI_S = 1.0  # of the first init(), on an idle machine


def test_another_environment(drill: Drill) -> None:
    attempts = drill("environments", 0)["environments"]
    for number, (mine, theirs) in enumerate(DRIFT.items()):
        odd = number % RANKS
        text = everywhere(attempts, number, mine, "ConfigurationMismatch", expected_s=START_OF_MPI_S)
        assert f"rank {odd} has {mine}" in text and f"{OTHERS[odd]} have {theirs}" in text, text
    for number, variable in enumerate(MAY_DIFFER, len(DRIFT)):
        everywhere(attempts, number, variable, "nothing")
    text = everywhere(attempts, len(DRIFT) + len(MAY_DIFFER), "helpers", "ConfigurationMismatch")
    assert "rank 2 has init() without" in text and "ranks 0-1 have init(algorithm=Layered(" in text, text


def another_version() -> str:
    mine = sordino.__version__
    return mine[:-1] + ("8" if mine[-1] == "9" else "9")


def make_another_version(folder: Path) -> None:
    """Make a copy of the package whose core has another version."""
    package = Path(sordino.__file__).parent
    shutil.copytree(package, folder / "other" / "sordino")
    (core,) = (folder / "other" / "sordino").glob("_core*.so")
    mine, other = (version.encode() + b"\0" for version in (sordino.__version__, another_version()))
    content = core.read_bytes()
    assert content.count(mine) == 1
    core.write_bytes(content.replace(mine, other))
    command = [sys.executable, "-c", "import sordino; print(sordino.__version__)"]
    told = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(folder / "other")}
    )
    assert told.stdout.strip() == another_version(), told.stderr


def test_another_version(drill: Drill) -> None:
    attempts = drill("version", 1)["version"]
    text = everywhere(attempts, 0, "version", "ConfigurationMismatch", expected_s=START_OF_MPI_S)
    assert f"rank 1 has Sordino {another_version()}" in text, text
    assert f"ranks 0, 2 have Sordino {sordino.__version__}" in text, text


# Rank 1 sleeps from its submission until rank 0, whose tensor differs, has raised and ended.
SLEEPS = """
import os, pathlib, signal, subprocess, sys, time, torch
import sordino.torch as hvd
place = pathlib.Path(sys.argv[1])
hvd.init()
if hvd.rank() == 1:
    handle = hvd.allreduce_async(torch.ones(3), name="loss")
    time.sleep(0.1)  # the coordinator has heard of it
    (place / "new").write_text(str(os.getpid()))
    os.rename(place / "new", place / "pid")
    os.kill(os.getpid(), signal.SIGSTOP)
    hvd.synchronize(handle)
while not (place / "pid").exists():
    time.sleep(0.01)
time.sleep(0.2)
wakes = f"while kill -0 {os.getpid()}; do sleep 0.01; done; kill -CONT " + (place / "pid").read_text()
subprocess.Popen(["sh", "-c", wakes], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
hvd.allreduce(torch.ones(3, dtype=torch.float64), name="loss")
"""


@pytest.mark.drill("asleep while another refuses and ends")
def test_a_rank_that_slept_raises_what_all_raise(tmp_path: Path) -> None:
    with Launched(tmp_path, ["-np", "2", "--", "python", "-c", SLEEPS, str(tmp_path)]) as job:
        assert job.ends() == 1, job.output
        differ = "allreduce 'allreduce.loss': rank 0 and rank 1 differ in dtype: float64 against float32"
        assert job.output.count(f"sordino.errors.OperationMismatch: {differ}") == 2, job.output
        assert "PeerLost" not in job.output
