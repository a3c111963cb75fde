"""The training example as users run it: one process, plain mpirun, `sordino run`; results, checkpoints, refused
arguments."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from checks.commands import SORDINO

from laboratory import recipes
from sordino import checkpoint
from sordino.launcher import mpi
from sordino.record.reading import Reader
from sordino.report.page.contents import contents

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "examples" / "train.py")
TIMEOUT_S = 150


def words(launcher: mpi.Launcher, ranks: int, *options: object, real: bool = False) -> list[str]:
    """Return the command. One rank is started without a launcher. With `real`, no rank is a fork (whose parent
    differs)."""
    command = [*(["python"] if real else forked.python()), TRAIN, *map(str, options)]
    return mpi.resolve(command) if ranks == 1 else mpi.command_line(launcher, mpi.Job(ranks, command))


def environment() -> dict[str, str]:
    """Return the environment without the variable by which `sordino run` describes the terminal."""
    return {name: value for name, value in os.environ.items() if name != "TTY_COMPATIBLE"}


def run(launcher: mpi.Launcher, ranks: int, *options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(launcher, ranks, *options), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment()
    )


def train(launcher: mpi.Launcher, ranks: int, folder: Path, *options: object) -> dict[str, Any]:
    """Train to the end; return the results of its JSON file, with its printed text as `output`."""
    file = folder / "results.json"
    file.unlink(missing_ok=True)
    done = run(launcher, ranks, *options, "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads(file.read_text())
    results["output"] = done.stdout
    return results


def parameters(path: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = checkpoint.load(path)["model"]
    return model


@pytest.fixture(scope="session")
def alone(launcher: mpi.Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(launcher, 1, tmp_path_factory.mktemp("alone"), "--epochs", 10)


def test_it_prints_what_the_report_of_its_record_shows(
    launcher: mpi.Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations, and checkpoints within the epochs, which average models, do not count as steps."""
    monkeypatch.setenv("SORDINO_RECORD", str(tmp_path / "run"))
    options = ["--algorithm", "push-sum", "--epochs", "2", "--batch-size", "256", "--checkpoint-every", "4"]
    printed = train(launcher, 2, tmp_path, *options, "--checkpoint", tmp_path / "saved.pt")
    found = contents(Reader(tmp_path / "run"))["summary"]
    assert found["steps"] == printed["steps"] == 12
    assert found["bytes"] == pytest.approx(printed["bytes_sent_per_worker_per_step"], rel=1e-12)
    assert found["exposed"] * 1e3 == pytest.approx(printed["exposed_ms_per_step"], rel=1e-3)
    assert found["besides"]["bytes"] > 6 * 4 * printed["parameters"] and found["besides"]["seconds"] > 0
    assert found["metrics"]["test_accuracy"]["last"] == pytest.approx(printed["test_accuracy"])


@pytest.mark.drill("the example with several ranks")
@pytest.mark.parametrize("ranks", [3, 2])
def test_any_number_of_ranks_learns_the_same(
    launcher: mpi.Launcher, alone: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    results = train(launcher, ranks, tmp_path, "--epochs", 10)
    assert alone["test_accuracy"] > 0.93
    # One image in 355 is 0.28 points.
    assert results["test_accuracy"] == pytest.approx(alone["test_accuracy"], abs=0.0060)
    for here, there in zip(results["epochs"], alone["epochs"]):
        assert here["train_loss"] == pytest.approx(there["train_loss"], rel=2e-2)
    assert results["world_size"] == ranks
    assert results["replicas_equal"] is True
    assert results["steps"] == results["steps_done"] == alone["steps"] == 120
    assert results["bytes_sent_per_worker_per_step"] > 0
    assert results["exposed_ms_per_step"] > 0
    assert results["images_per_second"] > 0


def test_what_one_process_reports(alone: dict[str, Any]) -> None:
    assert alone["bytes_sent_per_worker_per_step"] == 0
    assert alone["args"]["algorithm"] == "allreduce"
    assert alone["parameters"] == 71754
    assert set(alone["versions"]) == {"sordino", "python", "torch", "numpy"}
    for line in ("test accuracy", "images/s", "exposed communication", "bytes per worker and step"):
        assert line in alone["output"]
    assert "\x1b" not in alone["output"]


def test_uneven_and_empty_shares_give_the_gradient_of_the_whole_batch(launcher: mpi.Launcher, tmp_path: Path) -> None:
    # With batches of 2 rows, the first of 3 ranks gets none.
    options = ("--batch-size", 2, "--max-steps", 20, "--checkpoint")
    train(launcher, 1, tmp_path, *options, tmp_path / "one.pt")
    results = train(launcher, 3, tmp_path, *options, tmp_path / "three.pt")
    assert results["replicas_equal"] is True
    one, three = parameters(tmp_path / "one.pt"), parameters(tmp_path / "three.pt")
    assert max((one[name] - three[name]).abs().max().item() for name in one) < 2e-5
    # The comparison above has a meaning only if the parameters have changed.
    other = train(launcher, 1, tmp_path, "--batch-size", 2, "--max-steps", 1, "--checkpoint", tmp_path / "start.pt")
    assert other["steps"] == 1
    start = parameters(tmp_path / "start.pt")
    assert max((one[name] - start[name]).abs().max().item() for name in one) > 1e-3


@pytest.mark.drill("the example adds gradients up")
@pytest.mark.parametrize("ranks", [3, 1])
def test_accumulated_parts_give_the_gradient_of_the_whole_batch(
    launcher: mpi.Launcher, tmp_path: Path, ranks: int
) -> None:
    # Batches of 8 rows are cut into 4 parts: of 3 ranks some have parts of one row, and one rank has an empty part.
    options = ("--batch-size", 8, "--max-steps", 20, "--checkpoint")
    train(launcher, 1, tmp_path, *options, tmp_path / "whole.pt")
    results = train(launcher, ranks, tmp_path, "--accumulate", 4, *options, tmp_path / "parts.pt")
    assert results["replicas_equal"] is True
    whole, parts = parameters(tmp_path / "whole.pt"), parameters(tmp_path / "parts.pt")
    assert max((whole[name] - parts[name]).abs().max().item() for name in whole) < 2e-5


@pytest.mark.drill("the example with another algorithm")
def test_the_recipe_for_large_batches_learns_with_few_steps(launcher: mpi.Launcher, tmp_path: Path) -> None:
    options = ("--recipe", "large-batch", "--batch-size", 512, "--accumulate", 2, "--epochs", 40)
    results = train(launcher, 2, tmp_path, *options)
    assert results["steps"] == 120 and results["test_accuracy"] > 0.9
    assert [results["args"][name] for name in ("lr", "momentum", "label_smoothing")] == [1.0, 0.96, 0.1]
    rates = [recipes.rate(argparse.Namespace(**results["args"]), step, 120) for step in range(120)]
    assert max(rates) == rates[48] == 2.0 and rates[0] == pytest.approx(2 / 48) and rates[-1] < 0.01
    given = train(
        launcher, 1, tmp_path, *options, "--lr", 3, "--momentum", 0.5, "--label-smoothing", 0, "--max-steps", 1
    )
    assert [given["args"][name] for name in ("lr", "momentum", "label_smoothing")] == [3.0, 0.5, 0.0]


@pytest.mark.drill("the example is resumed")
@pytest.mark.parametrize("ranks", [2, 1])
def test_resuming_continues_bit_for_bit(launcher: mpi.Launcher, tmp_path: Path, ranks: int) -> None:
    straight = train(launcher, ranks, tmp_path, "--epochs", 2, "--checkpoint", tmp_path / "straight.pt")
    file = tmp_path / "c.pt"
    first = train(launcher, ranks, tmp_path, "--epochs", 1, "--checkpoint", file)
    assert first["parameters_sha256"] != straight["parameters_sha256"]
    # First to the middle of the second epoch, then to its end.
    second = train(launcher, ranks, tmp_path, "--epochs", 2, "--max-steps", 17, "--checkpoint", file, "--resume")
    third = train(launcher, ranks, tmp_path, "--epochs", 2, "--checkpoint", file)
    assert [first["steps"], second["steps"], third["steps"]] == [12, 5, 7]
    assert third["steps_done"] == straight["steps_done"] == 24
    assert "after 17 steps" in third["output"]
    assert third["parameters_sha256"] == straight["parameters_sha256"]
    assert third["test_accuracy"] == straight["test_accuracy"]
    # The whole state is compared, including momentum and generator, not only the weights.
    a, b = checkpoint.load(file), checkpoint.load(tmp_path / "straight.pt")
    assert a["rng"].equal(b["rng"])
    for key, entry in a["optimizer"]["state"].items():
        assert entry["momentum_buffer"].equal(b["optimizer"]["state"][key]["momentum_buffer"])
    # A finished training stays finished; --no-resume starts again.
    again = train(launcher, ranks, tmp_path, "--epochs", 2, "--checkpoint", file)
    assert (again["steps"], again["parameters_sha256"]) == (0, straight["parameters_sha256"])
    anew = train(launcher, ranks, tmp_path, "--epochs", 2, "--checkpoint", file, "--no-resume")
    assert (anew["steps"], anew["parameters_sha256"]) == (24, straight["parameters_sha256"])


def test_a_checkpoint_serves_another_number_of_ranks(launcher: mpi.Launcher, tmp_path: Path) -> None:
    file = tmp_path / "c.pt"
    train(launcher, 1, tmp_path, "--epochs", 1, "--checkpoint", file)
    results = train(launcher, 2, tmp_path, "--epochs", 2, "--checkpoint", file)
    assert "written by 1 ranks, but now there are 2" in results["output"]
    assert results["steps"] == 12
    assert results["replicas_equal"] is True


def child_of(pid: int) -> int:
    """Return the first child (a rank) of a process (mpirun)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError(f"{pid} has no child")


@pytest.mark.soak
def test_kill_9_leaves_a_checkpoint_from_which_training_ends_the_same(launcher: mpi.Launcher, tmp_path: Path) -> None:
    options = ("--epochs", 40, "--checkpoint")
    file = tmp_path / "c.pt"
    command = words(launcher, 2, *options, file)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()) as job:
        deadline = time.monotonic() + TIMEOUT_S
        while not file.exists() or checkpoint.load(file)["epoch"] < 3:
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.01)
        os.kill(child_of(job.pid), signal.SIGKILL)
        assert job.wait(timeout=TIMEOUT_S) != 0
    state = checkpoint.load(file)
    assert 3 <= state["epoch"] < 40
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    straight = train(launcher, 2, tmp_path, *options, tmp_path / "straight.pt")
    resumed = train(launcher, 2, tmp_path, *options, file)
    assert resumed["steps"] == straight["steps"] - 12 * state["epoch"]
    assert resumed["parameters_sha256"] == straight["parameters_sha256"]
    assert not list(tmp_path.glob(".*"))


def test_the_same_under_sordino_run(alone: dict[str, Any], tmp_path: Path) -> None:
    command = [*SORDINO, "run", "-np", "2", "--", *forked.python(), TRAIN]
    command += ["--algorithm", "allreduce", "--epochs", "10", "--json", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment())
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    results = json.loads((tmp_path / "r.json").read_text())
    assert results["test_accuracy"] == pytest.approx(alone["test_accuracy"], abs=0.0060)


@pytest.mark.drill("the example at a terminal")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_person_at_a_terminal_sees_a_bar(launcher: mpi.Launcher, ranks: int) -> None:
    ours, theirs = pty.openpty()
    command = words(launcher, ranks, "--epochs", 3, real=True)
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**environment(), "TERM": "xterm"}) as job:
        os.close(theirs)
        seen = b""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and select.select([ours], [], [], TIMEOUT_S)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # the last process that had the terminal open has ended
                break
        assert job.wait(timeout=TIMEOUT_S) == 0
    os.close(ours)
    text = seen.decode()
    assert "\x1b[" in text
    assert "━" in text
    assert "test accuracy" in text


NONSENSE_ON_TWO_RANKS = [
    (["--algorithm", "telepathy"], "--algorithm telepathy: unknown; use one of adpsgd, allreduce"),
    (["--lr", "fast"], "--lr: invalid float value"),
    (["--checkpoint", "no-such-folder/c.pt"], "there is no folder"),
]
NONSENSE = [
    *NONSENSE_ON_TWO_RANKS,
    (["--statistics", "s.json"], "--statistics s.json: needs --algorithm caps, not allreduce"),
    (["--algorithm", "caps", "--set", "scheduler={'often': 1}"], "use some of history_length, frequency, step"),
    (["--algorithm", "caps", "--threshold", "-1"], "CaPS(threshold=-1): must be at least 0"),
    (["--set", "group_size=2"], "--set group_size=2: allreduce has no setting group_size; it has: bucket_bytes"),
    (["--algorithm", "crossover", "--set", "interval=0"], "Crossover(interval=0): must be at least 1"),
    (["--label-smoothing", "1"], "--label-smoothing 1.0: must be at least 0 and below 1"),
    (["--epochs", "0"], "--epochs 0: must be 1 or more"),
    (["--resume"], "--resume and --no-resume need --checkpoint"),
    (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint FILE"),
    (["--checkpoint-every", "0", "--checkpoint", "c.pt"], "--checkpoint-every 0: must be 1 or more"),
    (["--data", "fashion-mnist", "--data-dir", "no-such-folder"], "no-such-folder: no such folder"),
    (["--data-dir", "."], "--data-dir: the digits come with scikit-learn"),
]


def refused(done: subprocess.CompletedProcess[str], complaint: str) -> None:
    assert done.returncode == 2, done.stderr
    assert (done.stdout + done.stderr).count(complaint) == 1
    assert "Traceback" not in done.stderr
    assert next(line for line in done.stderr.splitlines() if complaint in line).startswith("train.py: error: ")


@pytest.mark.parametrize(("options", "complaint"), NONSENSE)
def test_nonsense_is_refused_with_status_2(launcher: mpi.Launcher, options: list[str], complaint: str) -> None:
    refused(run(launcher, 1, *options), complaint)


@pytest.mark.parametrize(("options", "complaint"), NONSENSE_ON_TWO_RANKS)
def test_ranks_refuse_nonsense_once(launcher: mpi.Launcher, options: list[str], complaint: str) -> None:
    """The refused option is an algorithm, a value, or a file."""
    refused(run(launcher, 2, *options), complaint)


def test_help_is_printed_once(launcher: mpi.Launcher) -> None:
    done = run(launcher, 2, "--help")
    assert done.returncode == 0
    assert done.stdout.count("usage: train.py") == 1


def test_a_checkpoint_that_does_not_fit_is_refused(launcher: mpi.Launcher, tmp_path: Path) -> None:
    file = tmp_path / "c.pt"
    missing = run(launcher, 2, "--checkpoint", file, "--resume")
    assert missing.returncode == 2
    assert f"{file}: no such checkpoint" in missing.stderr
    train(launcher, 1, tmp_path, "--max-steps", 2, "--checkpoint", file)
    whole = file.read_bytes()
    other = run(launcher, 2, "--checkpoint", file, "--batch-size", 64)
    assert other.returncode == 2
    assert "was written with --batch-size 128, not 64" in other.stderr
    file.write_bytes(whole[:-1000])
    truncated = run(launcher, 2, "--checkpoint", file)
    assert truncated.returncode == 2
    assert f"{file}: truncated" in truncated.stderr
    assert "move it away, or start anew with --no-resume" in truncated.stderr
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "step-00000007.pt").write_bytes(b"cut")
    anew = run(launcher, 2, "--checkpoint", folder, "--max-steps", "1")
    assert anew.returncode == 0, anew.stderr
    assert "train.py: warning: training starts anew" in anew.stderr
    assert hashlib.sha256(file.read_bytes()).digest() == hashlib.sha256(whole[:-1000]).digest()
    checkpoint.save(file, {"something": "else"})
    foreign = run(launcher, 2, "--checkpoint", file)
    assert foreign.returncode == 2
    assert "not a checkpoint of train.py" in foreign.stderr


def test_gossip_learns_as_well_and_continues_from_the_mean(
    launcher: mpi.Launcher, alone: dict[str, Any], tmp_path: Path
) -> None:
    kept = ("--algorithm", "crossover", "--checkpoint", tmp_path / "model.pt")
    first = train(launcher, 3, tmp_path, *kept, "--epochs", 9)
    assert not first["replicas_equal"] and "consensus distance" in first["output"]
    results = train(launcher, 3, tmp_path, *kept, "--epochs", 10)
    assert results["steps_done"] > first["steps_done"] == first["steps"]
    assert results["test_accuracy"] > alone["test_accuracy"] - 0.02


@pytest.mark.drill("the example with another algorithm")
@pytest.mark.parametrize(
    "options",
    [
        ("push-sum", "overlap=1", "--bfloat16"),
        ("crossover", "group_size=2", "--label-smoothing", 0.1),
        ("elastic-averaging", "interval=2"),
        ("local-sgd", "group_size=2", "--interval", 4),
        ("scheduled-pull", "schedule=manager", "--interval", 8),
        ("adpsgd", "overlap=2"),
    ],
)
def test_settings_of_an_algorithm(
    launcher: mpi.Launcher, alone: dict[str, Any], tmp_path: Path, options: tuple[object, ...]
) -> None:
    name, setting, *others = options
    results = train(launcher, 4, tmp_path, "--algorithm", name, "--set", setting, *others)
    assert results["args"]["set"][0] == setting
    assert results["test_accuracy"] > alone["test_accuracy"] - 0.03


@pytest.mark.drill("the example with another algorithm")
def test_layers_train_to_the_last_digit_of_all_reduce(launcher: mpi.Launcher, tmp_path: Path) -> None:
    wanted = train(launcher, 2, tmp_path, "--max-steps", 15)
    for ranks, options in ((2, ()), (3, ("--communicator", "rank"))):
        found = train(launcher, ranks, tmp_path, "--max-steps", 15, "--algorithm", "layered", *options)
        assert found["world_size"] == 2
        assert found["parameters_sha256"] == wanted["parameters_sha256"]
        assert found["test_accuracy"] == wanted["test_accuracy"]
    refused = run(launcher, 2, "--algorithm", "layered", "--communicator", "rank", "--group-size", 2)
    assert refused.returncode == 2
    assert "cannot be divided into groups of 2 workers and a communicator" in refused.stderr


@pytest.mark.drill("the example with another algorithm")
def test_parameter_skipping_sends_less_and_says_what(
    launcher: mpi.Launcher, alone: dict[str, Any], tmp_path: Path
) -> None:
    everything = train(launcher, 4, tmp_path, "--epochs", 10)
    options = ("--algorithm", "caps", "--detector", "naive", "--epochs", 10, "--statistics", tmp_path / "skipped.json")
    scheduler = "scheduler={'frequency': 2, 'history_length': 2}"
    results = train(launcher, 4, tmp_path, *options, "--set", scheduler)
    # This data set cannot show a difference of half a point, as one image is 0.28 points. The claim caps-accuracy can.
    assert results["test_accuracy"] == pytest.approx(alone["test_accuracy"], abs=0.02)
    assert results["bytes_sent_per_worker_per_step"] < 0.95 * everything["bytes_sent_per_worker_per_step"]
    statistics = json.loads((tmp_path / "skipped.json").read_text())
    assert statistics["bytes_sent"] < 0.95 * statistics["bytes_unskipped"]
    assert {tensor["name"] for tensor in statistics["tensors"]} >= {"classifier.1.weight", "features.0.bias"}
    metrics = [point["metric"] for point in statistics["points"] if point["metric"] is not None]
    assert len(metrics) == 10 and metrics[-1] < metrics[0]
    assert len({point["threshold"] for point in statistics["points"]}) > 1
    assert (tmp_path / "skipped.png").read_bytes().startswith(b"\x89PNG")


def test_parameter_servers_that_are_ranks(launcher: mpi.Launcher, tmp_path: Path) -> None:
    """Averages of workers and of servers give the same result, up to rounding."""
    kept = ("--algorithm", "caps", "--threshold", 101, "--max-steps", 15)
    served = ("--set", "exchange=parameter-server", "--set", "servers=2", "--set", "dedicated_servers=True")
    wanted = train(launcher, 2, tmp_path, *kept)
    found = train(launcher, 4, tmp_path, *kept, *served)
    assert found["world_size"] == 2
    assert found["replicas_equal"] and wanted["replicas_equal"]
    assert found["epochs"][-1]["train_loss"] == pytest.approx(wanted["epochs"][-1]["train_loss"], rel=1e-4)
