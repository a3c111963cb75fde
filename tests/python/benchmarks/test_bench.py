"""Benchmarks: fair timing, right verdicts, reports made only from the JSON, and short runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checks.commands import SORDINO

import report
from results import ResultsOf
from sordino import timing
from sordino.bench import baselines, command_line, fusion, kernels, resnet
from sordino.errors import UsageError
from sordino.report import machines, verdicts
from sordino.report.tables import format_bytes, format_quartiles, format_seconds, table
from sordino.timing import Participants, Watch, race, rotated

# --- Timing -----------------------------------------------------------------------------------------------------------


def test_race_takes_turns_and_tells_slow_from_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    now = 0.0

    def contestant(name: str, seconds: float) -> Any:
        def run() -> None:
            nonlocal now
            calls.append(name)
            now += seconds

        return run

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    runs = {"slow": contestant("slow", 0.004), "fast": contestant("fast", 0.0005)}
    samples = race(runs, Participants(), budget=0.2, rounds=5, warmup=1)
    assert samples["slow"].median == pytest.approx(0.004)
    assert len(samples["slow"].rounds) == len(samples["fast"].rounds) == 5
    assert samples["fast"].seconds.size > samples["slow"].seconds.size  # turns of equal length
    turns = [name for index, name in enumerate(calls) if index == 0 or calls[index - 1] != name]
    assert len(turns) >= 6  # interleaved, not one after the other


def test_each_round_begins_with_the_next_contestant() -> None:
    assert ["".join(rotated("abc", number)) for number in range(4)] == ["abc", "bca", "cab", "abc"]


def test_race_stops_when_the_budget_is_spent_but_not_before_the_least_number_of_rounds() -> None:
    runs = {"sleepy": lambda: time.sleep(0.02)}
    samples = race(runs, Participants(), budget=0.01, rounds=50, warmup=1, least_rounds=3)["sleepy"]
    summary = samples.summary()
    assert len(samples.rounds) == 3 == summary["count"]
    assert 0.02 <= summary["least"] <= summary["q1"] <= summary["median"] <= summary["q3"]


def test_a_contestant_with_surroundings_is_not_about_in_others_turns() -> None:
    about = [False]

    @contextmanager
    def turn() -> Iterator[None]:
        about[0] = True
        yield
        about[0] = False

    seen: dict[str, set[bool]] = {"guest": set(), "host": set()}
    runs = {name: (lambda name=name: seen[name].add(about[0])) for name in seen}
    race(runs, Participants(), budget=0.01, rounds=3, turns={"guest": turn})
    assert seen == {"guest": {True}, "host": {False}}


def test_a_watch_sees_what_others_take() -> None:
    busy = "import time\nprint(flush=True)\nuntil = time.process_time() + 1\nwhile time.process_time() < until: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        watch = Watch(Participants())
        time.sleep(0.3)
        taken = watch.others()
    assert taken is None or taken > 0.2


# --- Results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("4KiB", 4096), ("64 k", 65536), ("256MiB", 256 << 20), ("1g", 1 << 30)]
)
def test_sizes_are_read_and_written(text: str, count: int) -> None:
    assert command_line.parse_bytes(text) == count
    assert command_line.parse_bytes(format_bytes(count)) == count


def test_what_is_no_size_is_named() -> None:
    for text in ("", "-4", "4 parsecs", "0", "1.5k"):
        with pytest.raises(UsageError, match="is not a size"):
            command_line.parse_bytes(text)


def test_times_have_three_digits() -> None:
    texts = [format_seconds(seconds) for seconds in (2.0, 0.0436, 0.00108, 24e-6, -0.002)]
    assert texts == ["2 s", "43.6 ms", "1.08 ms", "24 µs", "-2 ms"]
    assert format_quartiles({"median": 0.002, "q1": 0.001, "q3": 2.5}) == "2 ms (1 ms to 2.5 s)"


def test_results_hold_no_paths() -> None:
    assert (
        machines.without_paths("no libx in /home/me/env/lib/libx.so.1 and/or km/h")
        == "no libx in libx.so.1 and/or km/h"
    )


def test_verdicts() -> None:
    cases = [(5.0, 5.0, True), (4.9, 5.0, True), (1.5, 1.5, False), (1.6, 1.5, False), (None, 1.0, True)]
    assert [verdicts.target("it", *case)["met"] for case in cases] == [True, False, True, False, None]


def test_a_table_is_markdown() -> None:
    lines = table(["a", "number"], [["x", "1"], ["longer", "22"]]).splitlines()
    assert lines == ["| a      | number |", "| ------ | -----: |", "| x      |      1 |", "| longer |     22 |"]


# --- Baselines --------------------------------------------------------------------------------------------------------


def test_baselines_are_chosen_by_name() -> None:
    assert [baselines.parse_names(text) for text in ("horovod, Gloo", "none", "")] == [["gloo", "horovod"], [], []]
    with pytest.raises(UsageError, match="unknown baseline nccl; use some of gloo, horovod"):
        baselines.parse_names("gloo,nccl")


def test_a_baseline_that_is_not_there_is_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    monkeypatch.setattr(Participants, "maximum", lambda self, values: values)
    found = baselines.open_all(["horovod"], Participants(0, 2))
    assert found.found == []
    assert found.notes["horovod"].startswith("not found (ModuleNotFoundError")


# --- Reports ----------------------------------------------------------------------------------------------------------


def test_a_report_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"benchmark": "unheard of"}')
    assert report.main([str(tmp_path / "other.json")]) == 1
    assert "is not a result of a benchmark" in capsys.readouterr().err


# --- The model --------------------------------------------------------------------------------------------------------


def test_the_shapes_are_those_of_resnet50() -> None:
    shapes = resnet.resnet50_shapes()
    assert len(shapes) == len({name for name, _ in shapes}) == 161
    assert sum(int(np.prod(shape)) for _, shape in shapes) == 25_557_032
    assert shapes[0] == ("conv1.weight", (64, 3, 7, 7)) and shapes[-2] == ("fc.weight", (1000, 2048))


def test_backward_yields_every_gradient_and_does_all_the_work() -> None:
    done: list[int] = []

    class Counted(resnet.Work):
        def do(self, pieces: int) -> None:
            done.append(pieces)

    model = resnet.Model(Counted(), 100, 3.0)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(torch.ones(1, requires_grad=True)).backward()
    assert sum(done) == 100
    assert order == [name for name, _ in model.named_parameters()][::-1]
    assert all(bool((parameter.grad == 3).all()) for parameter in model.parameters())  # type: ignore[union-attr]


def test_fusion_targets() -> None:
    def mode(**exposed: float) -> dict[str, Any]:
        found: dict[str, Any] = {name: {"exposed": {"median": value}} for name, value in exposed.items()}
        found["sordino"]["percent_of_waiting_in_step"] = {"median": 100.5}
        return {"contestants": found, "failed": {}}

    two = {"ranks": 2, "modes": {"True": mode(sordino=0.01, horovod=0.09, gloo=0.03), "False": mode(sordino=-1.0)}}
    assert [one["met"] for one in fusion.targets(two)] == [True, True, False, True, None, None]
    failed = {"ranks": 2, "modes": {"True": mode(sordino=0.01, backend=0.012)}}  # Gloo was found, and failed
    assert [one["met"] for one in fusion.targets(failed)][-2:] == [None, True]
    one = {"ranks": 1, "modes": {"True": mode(sordino=0.001)}, "backward": {"median": 0.1}}
    assert [(target["value"], target["met"]) for target in fusion.targets(one)] == [(1.0, True)]


# --- Short runs -------------------------------------------------------------------------------------------------------


def test_kernels_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], results_of: ResultsOf) -> None:
    assert kernels.main(["--quick", "--sizes", "64KiB", "--results", str(tmp_path)]) == 0
    assert "# Kernels" in capsys.readouterr().out
    rows = results_of("kernels")["rows"]
    assert len({one["kernel"] for one in rows}) == 9
    assert sum(one["kernel"] == "reduce 2->2" for one in rows) == 13
    assert all(one["ratio"] > 0 and one["moved"] >= 2 * 0.9 * 65536 for one in rows)


def test_no_kernel_has_that_name() -> None:
    with pytest.raises(UsageError, match="--only reduse: no kernel has this in its name"):
        kernels.main(["--quick", "--sizes", "64KiB", "--only", "reduse"])


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sordino.cli", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_quick_runs_write_nothing_unless_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = bench("kernels", "--quick", "--sizes", "64KiB")
    assert done.returncode == 0, done.stderr
    assert "# Kernels" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("launcher")
def test_fusion_runs(tmp_path: Path, results_of: ResultsOf) -> None:
    words = ["--quick", "--compute-ms", "1", "--baselines", "gloo", "--results", str(tmp_path)]
    done = bench("-np", "2", "fusion", *words)
    assert done.returncode == 0, done.stderr
    for mode in results_of("fusion")["modes"].values():
        assert mode["contestants"].keys() == {"plain", "sordino", "waits in step", "gloo", "backend", "buckets"}
        assert mode["failed"] == {}


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("launcher")
def test_fsdp_runs(tmp_path: Path, results_of: ResultsOf) -> None:
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "fsdp.py"
    words = [*SORDINO, "run", "-np", "2", "--", sys.executable, str(script), "--quick"]
    done = subprocess.run([*words, "--results", str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = results_of("fsdp_np2")
    assert found["contestants"].keys() == {"plain", "gloo", "sordino", "shared"} and found["ranks"] == 2


@pytest.mark.run_of_a_benchmark
def test_joining_runs(tmp_path: Path, results_of: ResultsOf) -> None:
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "joining.py"
    words = [sys.executable, str(script), "--quick", "--results", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    kinds = results_of("joining")["kinds"]
    assert kinds.keys() == {"respawn", "restart"}
    assert 0 < kinds["respawn"]["from_import"]["median"] < kinds["respawn"]["from_kill"]["median"]


@pytest.mark.run_of_a_benchmark
def test_soak_joins_runs(tmp_path: Path, results_of: ResultsOf) -> None:
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "soak_joins.py"
    words = [sys.executable, str(script), "--data", "digits", "--ranks", "2", "--minutes", "0.25", "--every", "8"]
    done = subprocess.run([*words, "--results", str(tmp_path)], capture_output=True, text=True, timeout=240)
    found = results_of("soak_joins")["disturbed"]
    assert (found["status"], found["equal"], found["left"]) == (0, True, []), done.stdout + done.stderr
    assert found["kills"] >= 1 and abs(found["accuracy"] - results_of("soak_joins")["accuracy"]) < 0.05


@pytest.mark.run_of_a_benchmark
def test_what_a_rank_sends_hardly_grows() -> None:
    """Operations that need no data of all ranks cost the average rank no more messages among 64 ranks than among 16,
    and the coordinator the same number for each rank."""
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "scale.py"
    found = []
    for size in (16, 64):
        done = subprocess.run([sys.executable, str(script), "--one", str(size)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append({phase["phase"]: phase for phase in json.loads(done.stdout)["phases"]})
    few, many = found
    for name in ("first operation", "all-reduce", "broadcast", "new process set", "step of Crossover"):
        assert many[name]["messages"] < few[name]["messages"] + 1, name
        assert many[name]["most_messages"] < 64 + 16, name
        assert many[name]["bytes"] < 2 * few[name]["bytes"] + 100, name
