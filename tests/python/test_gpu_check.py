"""gpu_check.sh where there is no GPU, and its summary of what others have found."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import gpu_summary

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.sh"
JUNIT = """<testsuites><testsuite name="pytest" errors="0" failures="1" skipped="2" tests="10">
<testcase classname="t" name="test_fine"/>
<testcase classname="t" name="test_bad[2]"><failure message="assert 1 == 2&#10;more">long</failure></testcase>
</testsuite></testsuites>"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there, and the check would begin")
def test_without_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SORDINO_GPU_CHECK_STAGES"}
    done = subprocess.run([SCRIPT, "--quick"], env=environment | {"OUT": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2 and "no CUDA device" in done.stderr
    assert not list(tmp_path.iterdir())


def found(folder: Path, *stages: str) -> tuple[str, bool]:
    (folder / "stages.tsv").write_text("".join(f"{line}\n" for line in stages))
    return gpu_summary.summarize(folder, folder)


def test_a_summary_tells_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_summary.platform, "node", lambda: "some-host")
    (tmp_path / "gpus.csv").write_text("A GPU, 580.1, 81559 MiB\n")
    (tmp_path / "two_ranks.xml").write_text(JUNIT)
    (tmp_path / "build.log").write_text("in /some/where/file.cc on some-host\nno\n")
    results = {
        "name": "gpu_step",
        "targets": [{"what": "overhead", "value": 1.234, "limit": 2.0, "at_least": False, "met": True}],
        "wrong": ["arena at 1 MiB (host)"],
    }
    (tmp_path / "gpu_step.json").write_text(json.dumps(results))
    text, fine = found(
        tmp_path,
        "build\tfailed\t7\tstatus 1",
        "two_ranks\tfailed\t30\tstatus 1",
        "large\tleft out\t0\t--quick",
    )
    assert not fine and "**Something failed.** Left out: large." in text
    assert "- GPU: A GPU, 81559 MiB, driver 580.1" in text
    assert "| two_ranks | failed | 30 s | 7 passed, 1 failed, 2 skipped; status 1 |" in text
    assert "- `test_bad[2]: assert 1 == 2`" in text
    assert "in file.cc on host" in text and "/some/where" not in text
    assert "gpu_step: overhead: 1.23 (≤ 2): met" in text and "WRONG RESULT: arena" in text


def test_a_summary_of_success(tmp_path: Path) -> None:
    text, fine = found(tmp_path, "build\tpassed\t7\t", "ctest\tpassed\t5\t")
    assert fine and "Nothing failed." in text and "- GPU: none" in text
    assert "## What failed" not in text
    assert not found(tmp_path)[1], "nothing was run"


def test_skipping_everything_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "kernels.xml").write_text('<testsuite tests="9" failures="0" errors="0" skipped="9"/>')
    text, fine = found(tmp_path, "kernels\tpassed\t1\t")
    assert not fine and "nothing was run" in text
