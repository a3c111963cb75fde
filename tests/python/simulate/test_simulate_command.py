"""`sordino simulate`: its options, refused arguments, its table and its files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sordino.algorithms import ADPSGD, ScheduledPull
from sordino.cli.app import main
from sordino.simulate import choices, command
from sordino.simulate.job import Job
from sordino.simulate.links import Links
from sordino.simulate.report import source

BASE = ["simulate", "--algorithm"]


def results(path: Path, *words: str) -> dict[str, Any]:
    assert main([*BASE, *words, "--quiet", "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def timeless(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if not name.startswith("wall_")}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["dance"], "--algorithm dance: unknown; use one of adpsgd, allreduce"),
        (["adpsgd", "--data", "none", "--set", "speed=1"], "--set speed=1: adpsgd has no setting speed"),
        (["adpsgd", "--workers", "0"], "--workers 0: must be at least 1"),
        (["adpsgd", "--wide", "9"], "--wide 9: there are only 8 workers"),
        (["adpsgd", "--seconds", "nan"], "--seconds nan: must be above 0"),
        (["adpsgd", "--seconds", "inf"], "--seconds inf: must be finite"),
        (["adpsgd", "--seconds", "1", "--steps", "2"], "give one of them"),
        (["adpsgd", "--seed", "1", "--seeds", "2"], "give one of them"),
        (["adpsgd", "--seed", "3", "--seed", "3"], "--seed 3: is given twice"),
        (["adpsgd", "--data", "none", "--kill", "1@2", "--kill", "1@3"], "worker 1 is given twice"),
        (["adpsgd", "--data", "none", "--workers", "2", "--kill", "0@1", "--kill", "1@2"], "kills all workers"),
        (["adpsgd", "--data", "none", "--seconds", "1", "--kill", "2@2"], "--kill 2@2: has no effect"),
        (["adpsgd", "--data", "none", "--set", "interval=2", "--set", "interval=4"], "interval is given twice"),
        (["adpsgd", "--seed", "-1"], "--seed -1: must be from 0"),
        (["adpsgd", "--latency-ms", "-1"], "--latency-ms -1: must be at least 0"),
        (["adpsgd", "--compute-ms", "fast"], "--compute-ms fast: expected a number or `measured`"),
        (["adpsgd", "--compute-ms", "0"], "--compute-ms 0: must be above 0"),
        (["adpsgd", "--data", "none", "--compute-ms", "measured"], "--compute-ms measured: needs data"),
        (["adpsgd", "--compute-ms", "1", "--slow", "8:2"], "--slow 8:2: the worker must be from 0 to 7"),
        (["adpsgd", "--compute-ms", "1", "--slow", "2"], "expected WORKER:FACTOR"),
        (["adpsgd", "--compute-ms", "1", "--message-mib", "1", "--kill", "2:1"], "expected WORKER@SECONDS"),
        (["adpsgd", "--data", "digits", "--data-dir", "x"], "--data-dir x: needs --data fashion-mnist"),
        (["adpsgd", "--links", "missing.json"], "--links missing.json: cannot be read"),
        (["adpsgd", "--links", "missing.json", "--wide", "1"], "gives the rates of all links"),
        (["adpsgd", "--json", "no/such.json"], "--json no/such.json: there is no folder"),
        (["adpsgd", "--plot", "curve.txt"], "--plot curve.txt: name a .png"),
        (["adpsgd", "--data", "none", "--images", "9"], "--images 9: there are no images"),
        (["adpsgd", "--data", "none", "--channels", "2"], "--channels 2: there are no images"),
        (["adpsgd", "--data", "digits", "--images", "9999", "--steps", "1"], "--images 9999: digits has only 1442"),
        (["adpsgd", "--data", "digits", "--images", "99", "--steps", "1"], "has only 12 images"),
        (["adpsgd", "--data", "none", "--sharing", "fair", "--workers", "257"], "the limit is 256 workers, not 257"),
        (["allreduce", "--data", "none", "--sharing", "fair"], "--sharing fair: needs scheduled-pull or adpsgd"),
        (["adpsgd", "--data", "none", "--load-ms", "1"], "--load-ms 1: needs an algorithm"),
        (["scheduled-pull", "--data", "none", "--set", "manager=8"], "--set manager=8: must be a worker"),
        (["scheduled-pull", "--data", "none", "--set", "buffers=average"], "have no buffers"),
        (["scheduled-pull", "--data", "digits", "--workers", "99", "--steps", "1"], "has only 14 images"),
    ],
)
def test_wrong_options_have_status_2(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, *words, "--processes", "1"]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "words"),
    [("simpy", []), ("matplotlib", ["--plot", "curve.png"]), ("matplotlib", ["--gantt", "gantt.png"])],
)
def test_what_is_missing_is_named(
    package: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    assert main([*BASE, "adpsgd", "--data", "none", *words]) == 1
    assert "pip install 'sordino[simulate]'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choices.os, "access", lambda *_: False)  # root may write everywhere
    assert main([*BASE, "allreduce", "--data", "none", "--steps", "1", "--json", str(tmp_path / "a.json")]) == 2
    assert f"the folder {tmp_path} cannot be written" in capsys.readouterr().err


def test_a_refused_run_leaves_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["allreduce", "--data", "digits", "--batch", "999", "--seeds", "2", "--processes", "1", "--quiet"]
    for _ in range(2):
        assert main([*BASE, *words, "--record", str(tmp_path / "record")]) == 2
        assert "each of 8 workers has only" in capsys.readouterr().err


def test_a_run_that_diverges_has_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["allreduce", "--data", "none", "--lr", "1e30", "--steps", "9", "--seeds", "2", "--processes", "1"]
    with np.errstate(all="ignore"):
        assert main([*BASE, *words, "--json", str(tmp_path / "a.json"), "--record", str(tmp_path / "record")]) == 0
    found = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert [run["distance"] for run in found["runs"]] == [None, None]
    assert "nan" in capsys.readouterr().out


SMALL = ["--data", "digits", "--workers", "4", "--wide", "2", "--steps", "16", "--points", "3", "--compute-ms", "3"]


def test_the_four_modes_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("a.json", "curve.png", "gantt.svg")]
    words = [*BASE, "scheduled-pull", *SMALL, "--processes", "2", "--seeds", "2"]
    assert main([*words, "--json", str(files[0]), "--plot", str(files[1]), "--gantt", str(files[2])]) == 0
    told = capsys.readouterr().out
    modes = ["no overlap", "naive overlap", "scheduled, manager", "scheduled, autonomous"]
    assert all(f"| {mode}" in told for mode in modes)
    assert "3.5 MiB per model (default), 3 ms per step;" in told
    assert "best accuracy against no overlap" in told
    assert f"too little training: {'; '.join(modes)}. Guessing is right in 10%" in told
    found = json.loads(files[0].read_text())
    assert [(run["mode"], run["seed"]) for run in found["runs"]] == [(mode, seed) for seed in (1, 2) for mode in modes]
    assert all(run["steps"] == 16 for run in found["runs"])
    assert all(path.stat().st_size > 1000 for path in files)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in files)
    # The same in one process, apart from real time; with another seed it differs.
    again = results(tmp_path / "b.json", "scheduled-pull", *SMALL, "--seeds", "2", "--processes", "1")
    assert timeless(again) == timeless(found)
    first, second = ([run for run in found["runs"] if run["seed"] == seed] for seed in (1, 2))
    assert all(a["curve"] != b["curve"] for a, b in zip(first, second, strict=True))
    assert [run["algorithm"]["seed"] for run in second] == [2] * 4


def test_who_waits_reads_how_long_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [100.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: clock[0])
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    job = Job(ADPSGD(), 2, Links.wide(2, 0, 1.0, 10.0, 0.0), np.full(2, 0.01), 1.0, steps=1, data="none")
    with command._teller([command.Run("some", job)] * 4, quiet=False) as told:
        told.part(0, 0.0)
        assert told.line(clock[0]) == "  0% of 4 runs"
        clock[0] += 30.0
        told.part(0, 0.5)
        told.part(1, 0.1)
    assert capsys.readouterr().out == " 12% of 4 runs, about 4 min more\n"


def test_equal_virtual_time_means_fewer_steps_for_those_that_wait(tmp_path: Path) -> None:
    words = ["--data", "none", "--workers", "8", "--wide", "2", "--seconds", "4"]
    found = results(tmp_path / "a.json", "scheduled-pull", *words, "--processes", "1")
    steps = {run["mode"]: run["steps"] for run in found["runs"]}
    ages = {run["mode"]: run["age"] for run in found["runs"]}
    waits = {run["mode"]: run["waiting"] for run in found["runs"]}
    assert {run["seconds"] for run in found["runs"]} == {4.0}
    assert steps["naive overlap"] == steps["scheduled, manager"] == 400
    assert steps["no overlap"] < 350
    assert waits["naive overlap"] == waits["scheduled, manager"] == 0
    assert waits["no overlap"] > 0.5
    assert ages["naive overlap"] == pytest.approx(0.16)
    assert ages["scheduled, manager"] < ages["scheduled, autonomous"] < 0.5 * ages["naive overlap"]


def test_one_mode_that_is_named_runs_alone(tmp_path: Path) -> None:
    words = ["--set", "overlap=naive", "--data", "none", "--steps", "40", "--slow", "1:4", "--kill", "2@0.1"]
    found = results(tmp_path / "a.json", "scheduled-pull", *words)
    assert [run["mode"] for run in found["runs"]] == ["scheduled-pull"]
    assert found["setting"]["compute"][:3] == pytest.approx([0.01, 0.04, 0.01])
    assert found["runs"][0]["workers"]["steps"][:3] == [40, 40, 10]


def test_compute_time_is_measured_where_it_is_not_given(tmp_path: Path) -> None:
    found = results(tmp_path / "a.json", "adpsgd", "--data", "digits", "--workers", "2", "--steps", "4")
    assert found["setting"]["compute_from"] == "measured"
    assert 1e-5 < found["setting"]["compute"][0] < 1.0
    assert found["setting"]["message_bytes"] == 4 * 31_050


def test_the_sources_figures_stand_only_beside_its_setting() -> None:
    def job(workers: int, wide: int, latency: float = 5e-3, data: Any = "fashion-mnist") -> Job:
        links = Links.wide(workers, wide, 1.0, 10.0, latency)
        return Job(ScheduledPull(), workers, links, np.full(workers, 0.01), 1.0, steps=1, data=data)

    assert source(job(8, 2))["scheduled, autonomous"] == 0.867
    assert source(job(8, 0))["no overlap"] == 0.860
    assert [source(one) for one in (job(8, 3), job(6, 2), job(8, 2, 1e-3), job(8, 2, data="digits"))] == [{}] * 4


def test_a_thousand_workers_without_data(tmp_path: Path) -> None:
    found = results(tmp_path / "a.json", "scheduled-pull", "--data", "none", "--workers", "1000", "--steps", "32",
                    "--set", "schedule=autonomous")  # fmt: skip
    assert found["runs"][0]["steps"] == 32
    assert "workers" not in found["runs"][0]
