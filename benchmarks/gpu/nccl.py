"""Build an NCCL that several ranks of one GPU can use, from its source, with the functions that Sordino calls.

  python -m benchmarks.gpu.nccl [--try] FOLDER SOURCE.tar.gz [ARCHITECTURE]

The library is FOLDER/build/lib/libnccl.so.2. Only NCCL's kernels for one architecture, one algorithm (rings) and one
protocol are built, a small part of them. `--try` unpacks the source and generates the kernels' files, but compiles
nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

LEAST = (2, 30)
"""The first NCCL with NCCL_MULTI_RANK_GPU_ENABLE."""
FUNCTIONS = (
    "SendRecv|(AllGather|Broadcast) RING *|"
    "(AllReduce|Reduce|ReduceScatter) (Sum|Prod|MinMax) ([iu](8|32|64)|f(16|32|64)|bf16) RING SIMPLE|"
    "(AllReduce|Reduce|ReduceScatter) PreMulSum (f(16|32|64)|bf16) RING SIMPLE"
)
"""Value of NCCL's ONLY_FUNCS (see its src/device/generate.py). An average is NCCL's PreMulSum."""


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a tarball of NCCL's source; return its top folder. ValueError for other files and versions before 2.30."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # GNU tar writes nothing outside of the folder. Python's tarfile guarantees that only from 3.11.4 on.
    words = ["tar", "--extract", "--gzip", "--file", str(archive), "--directory", str(folder)]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise ValueError(
            f"{archive}: {lines[0] if lines else 'tar failed'}; give a .tar.gz of NCCL's source, as GitHub has one for "
            "each tag"
        )
    for version in sorted(folder.glob("**/makefiles/version.mk")):
        found = tuple(int(part) for part in re.findall(r"NCCL_(?:MAJOR|MINOR)\s*:=\s*(\d+)", version.read_text()))
        if found >= LEAST:
            return version.parents[1]
        raise ValueError(f"{archive} is NCCL {'.'.join(map(str, found))}: several ranks on one GPU need 2.30 or later")
    raise ValueError(f"{archive} has no makefiles/version.mk: it is not NCCL's source")


def generated(source: Path, folder: Path) -> int:
    """Generate NCCL's source files of FUNCTIONS; return the number of files that contain kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "generate.py", folder, FUNCTIONS], cwd=source / "src" / "device", check=True)
    return sum("DEFINE_ncclDevFunc" in path.read_text() for path in folder.glob("*.cu"))


def toolkit() -> Path:
    """Return the folder of CUDA's compiler and headers. ValueError if it is not found."""
    nvcc = shutil.which("nvcc")
    folders = [*([Path(nvcc).resolve().parents[1]] if nvcc else []), Path("/usr/local/cuda")]
    for folder in folders:
        if (folder / "include" / "cuda_runtime.h").is_file():
            return folder
    raise ValueError(f"no CUDA toolkit in {' or '.join(map(str, folders))}: put its nvcc on PATH")


def build(source: Path, folder: Path, architecture: str) -> None:
    """Compile and link NCCL. CalledProcessError if that fails, ValueError without CUDA."""
    words = ["make", "-C", str(source), f"-j{os.cpu_count()}", "src.lib", f"BUILDDIR={folder}"]
    words += [f"NVCC_GENCODE=-gencode=arch=compute_{architecture},code=sm_{architecture}", f"ONLY_FUNCS={FUNCTIONS}"]
    subprocess.run([*words, f"CUDA_HOME={toolkit()}"], check=True)


def main() -> int:
    """Build NCCL, or do what precedes compilation."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--try", dest="tried", action="store_true", help="compile nothing")
    options.add_argument("folder", type=Path)
    options.add_argument("source", type=Path)
    options.add_argument(
        "architecture", nargs="?", default="90", help="compute capability without the dot (default 90)"
    )
    chosen = options.parse_args()
    folder = chosen.folder.resolve()
    try:
        source = unpack(chosen.source, folder / "source")
        if chosen.tried:
            print(f"{generated(source, folder / 'generated')} files of kernels")
        else:
            build(source, folder / "build", chosen.architecture)
    except ValueError as error:
        sys.exit(f"gpu.nccl: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"gpu.nccl: {error.cmd[0]} failed with status {error.returncode}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
