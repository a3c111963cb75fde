"""A job continues from its checkpoints after kills at any moment, with damaged files, on a full disk. The newest
complete checkpoint counts, and the result is that of an undisturbed training."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from launched import Launched, own_mounts

import soak
from results import ResultsOf
from sordino import checkpoint
from sordino.launcher import mpi

TRAIN = [str(Path(__file__).resolve().parents[2] / "examples" / "train.py"), "--max-steps", "60"]
WORKER = Path(__file__).with_name("saving_worker.py")
WHOLE_JOB_S = 250  # on a machine with other load; alone it takes a tenth of that


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with Launched(folder, ["-np", "2", "--", *forked.python(), *TRAIN, "--json", str(folder / "results.json")]) as job:
        assert job.ends(WHOLE_JOB_S) == 0, job.output
    return results(folder)


@pytest.mark.drill("damaged checkpoints")
def test_training_continues_from_the_newest_whole_checkpoint(
    starter: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    folder = checkpoint.Folder(tmp_path / "saved")
    first = ["--checkpoint", f"{folder.path}/", "--checkpoint-every", "5", "--max-steps", "10"]
    with Launched(tmp_path, ["-np", "2", "--", *forked.python(), *TRAIN, *first]) as job:
        assert job.ends(WHOLE_JOB_S) == 0, job.output
    assert folder.steps() == [5, 10]
    good = folder.path / "step-00000010.pt"
    whole = good.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    (folder.path / "step-00000020.pt").write_bytes(flipped)
    (folder.path / "step-00000030.pt").write_bytes(whole[: len(whole) // 3])
    (folder.path / "step-00000040.pt").touch()
    (folder.path / ".step-00000050.pt.tmp").write_bytes(whole[:1000])
    shutil.copy(good, folder.path / f"step-00000060.{'0' * 16}.shard")  # of a checkpoint that was never completed
    last = ["--checkpoint", f"{folder.path}/", "--json", str(tmp_path / "results.json")]
    with Launched(tmp_path, ["-np", "2", "--", *forked.python(), *TRAIN, *last]) as job:
        assert job.ends(WHOLE_JOB_S) == 0, job.output
        job.leaves_nothing()
        assert "after 10 steps" in job.output
        passed_over = re.findall(r"checkpoint skipped: \S*step-0*(\d+)\.pt: (truncated|damaged)", job.output)
        assert passed_over == [("40", "truncated"), ("30", "truncated"), ("20", "damaged")]
    assert results(tmp_path)["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert sorted(path.name for path in folder.path.iterdir()) == ["step-00000048.pt", "step-00000060.pt"]


@pytest.mark.drill("a full disk")
def test_a_full_disk_costs_the_checkpoint_and_not_the_training(
    starter: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    full, copy = tmp_path / "full", tmp_path / "copy"
    full.mkdir()
    # One checkpoint takes 580 KB, and there is no space for a second one.
    mount = 'mount -t tmpfs -o size=900k tmpfs "$1"; from=$1 to=$2; shift 2'
    script = f'{mount}; "$@"; status=$?; cp -a "$from" "$to"; exit $status'
    before = own_mounts(script, str(full), str(copy))
    options = ["--checkpoint", f"{full}/", "--json", str(tmp_path / "results.json")]
    with Launched(tmp_path, ["-np", "2", "--", *forked.python(), *TRAIN, *options], before) as job:
        assert job.ends(WHOLE_JOB_S) == 1, job.output
        job.leaves_nothing()
        lines = [line for line in job.output.splitlines() if line.startswith("train.py: warning: ")]
        assert len(lines) == 4  # of 5 epochs
        for line in lines:
            assert "the checkpoint cannot be written" in line and "No space left on device" in line
            assert line.endswith("an earlier checkpoint is unchanged")
    assert results(tmp_path)["parameters_sha256"] == undisturbed["parameters_sha256"]
    newest = checkpoint.Folder(copy).newest()
    assert newest is not None and newest.step == 12
    assert [path.name for path in copy.iterdir()] == [newest.path.name]


@pytest.mark.drill("killed while saving")
def test_ranks_killed_while_saving_leave_whole_checkpoints(starter: str, tmp_path: Path) -> None:
    """With shards: whatever each rank had written by then, a checkpoint that is found is whole, and no complete one is
    lost."""
    folder, generator, last = checkpoint.Folder(tmp_path / "saved"), random.Random(2), 45
    command = [*forked.python(), str(WORKER), str(folder.path), str(last)]
    reached: Callable[[], int] = lambda: max(map(int, re.findall(r"complete (\d+)", job.output)), default=0)  # noqa: E731
    with Launched(tmp_path, ["-np", "3", "--restarts", "9", "--", *command]) as job:
        for restart in range(1, 3):
            job.wait_for(lambda restart=restart: reached() >= 15 * restart, WHOLE_JOB_S)
            time.sleep(generator.uniform(0, 0.03))
            job.send(job.rank(restart - 1), signal.SIGKILL)
            job.wait_for(lambda restart=restart: f"; restart {restart} of 9" in job.output)
            before = reached()
            job.wait_for(lambda restart=restart: job.output.count("found ") == restart + 1, WHOLE_JOB_S)
            assert int(re.findall(r"found (\d+)", job.output)[-1]) >= before
        assert job.ends(WHOLE_JOB_S) == 0, job.output
        job.leaves_nothing()
    assert folder.steps() == [last - 1, last]
    assert len(list(folder.path.iterdir())) == 2 * (1 + 3)


SHORT = ["--data", "digits", "--minutes", "0.2", "--every", "6", "--checkpoint-every", "20"]


@pytest.mark.timeout(900)  # on a machine with other load; alone it takes half a minute
@pytest.mark.soak
def test_kills_at_random_moments_cost_time_and_nothing_else(
    launcher: mpi.Launcher, tmp_path: Path, results_of: ResultsOf
) -> None:
    if launcher.family != "openmpi":
        pytest.skip("written for Open MPI's launcher")
    words = [*SHORT, "--ranks", "2", "--steps", "400", "--results", str(tmp_path)]
    status = soak.main(words)
    found = results_of("soak_restart")
    stormy = found["disturbed"]
    assert status == 0 and all(one["met"] for one in found["targets"]), found
    assert stormy["kills"] and stormy["steps_done"] == 400 and stormy["replicas_equal"]
    assert not any(one["outlived"] for one in stormy["kills"])
    assert stormy["restarts"] == len(stormy["kills"])
    # They continue from the newest checkpoint or, if it was just being written, from the one before.
    assert all((one["steps_repeated"] or 0) < 40 for one in stormy["kills"]), stormy["kills"]
    assert stormy["parameters_sha256"] == found["undisturbed"]["parameters_sha256"]
