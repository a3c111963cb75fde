"""The recipes for clusters, as far as one machine can test them (docs/recipes.md has the limits)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

from laboratory.options import parse
from sordino import sim

ROOT = Path(__file__).resolve().parents[3]
SLURM = sorted((ROOT / "recipes" / "slurm").glob("*.sbatch"))
MANIFESTS = sorted((ROOT / "recipes" / "kubernetes").glob("*.yaml"))
TRAIN = "/opt/sordino/examples/train.py"

SRUN = """#!/bin/bash
# A node is a process here.
for node in $(seq "$SLURM_JOB_NUM_NODES"); do "${@:2}" & done
status=0
for job in $(jobs -p); do wait "$job" || status=1; done
exit $status
"""


@pytest.mark.parametrize("path", SLURM, ids=lambda path: path.stem)
def test_a_batch_script_wants_to_know_what_to_train(path: Path) -> None:
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True)
    assert done.returncode == 2 and "say what to train" in done.stderr


@pytest.mark.soak
def test_a_torchrun_on_each_node(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho localhost\necho localhost\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        **{"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2"},
        "RANKS_PER_NODE": "2",
    }
    words = ["bash", str(ROOT / "recipes/slurm/torchrun.sbatch"), str(ROOT / "examples/minimal.py")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "allreduce on 4 rank(s)" in done.stdout


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_trains_what_the_image_holds(path: Path) -> None:
    text = path.read_text()
    manifest = yaml.safe_load(text)
    trainer = manifest["spec"].get("trainer")
    if trainer is None:
        trainer = manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    words = [*trainer["command"], *trainer["args"]]
    assert sim.run(1, parse, words[words.index(TRAIN) + 1 :], "")
    image = (ROOT / "recipes" / "Dockerfile").read_text()
    assert "COPY examples /opt/sordino/examples" in image and f"image: {trainer['image']}" in text


def test_what_a_schema_does_not_know_is_an_error() -> None:
    spec = spec_from_file_location("check_manifests", ROOT / "tools" / "check_manifests.py")
    assert spec and spec.loader
    tool = module_from_spec(spec)
    spec.loader.exec_module(tool)
    number = {"x-kubernetes-int-or-string": True, "type": "string"}
    schema = {"type": "object", "properties": {"kind": {}, "apiVersion": {}, "spec": {"properties": {"nodes": number}}}}
    version = {"name": "v1", "schema": {"openAPIV3Schema": schema}}
    known = dict(tool.schemas({"spec": {"group": "g", "names": {"kind": "Job"}, "versions": [version]}}))
    job = {"apiVersion": "g/v1", "kind": "Job", "spec": {"nodes": 2}}
    assert tool.faults(job, known) == []
    assert "'ranks' was unexpected" in tool.faults(job | {"spec": {"ranks": 2}}, known)[0]
    assert tool.faults(job | {"kind": "Other"}, known) == ["no schema of Other g/v1 was given"]
