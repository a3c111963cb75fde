"""Build Sordino into a folder, or run the C++ tests of such a build. Nothing is installed outside of the folder.

python -m benchmarks.gpu.build FOLDER [ARCHITECTURE]     # no architecture: no CUDA
python -m benchmarks.gpu.build --ctest FOLDER
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOLD = "from sordino._core import build_info, cuda_devices; print(build_info()); print(cuda_devices(), 'GPUs')"


def run(*words: str | Path) -> None:
    """Run a command. CalledProcessError if it fails."""
    subprocess.run([str(word) for word in words], check=True)


def build(work: Path, architecture: str) -> None:
    """Build into `work`/cmake, and install the package into `work`/site."""
    import pybind11

    tree, site = work / "cmake", work / "site"
    cuda = ["-DSORDINO_CUDA=ON", f"-DSORDINO_CUDA_ARCHITECTURES={architecture}-real"]
    run("cmake", "-S", ROOT, "-B", tree, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DSORDINO_TESTS=ON",
        *(cuda if architecture else ["-DSORDINO_CUDA=OFF"]), f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")  # fmt: skip
    run("cmake", "--build", tree)
    shutil.rmtree(site / "sordino", ignore_errors=True)
    shutil.copytree(ROOT / "python" / "sordino", site / "sordino")
    run("cmake", "--install", tree, "--prefix", site)
    run(sys.executable, "-c", TOLD)


def main(words: list[str]) -> int:
    """Build, or run the C++ tests."""
    if words[0] == "--ctest":
        run("ctest", "--test-dir", Path(words[1]) / "cmake", "--output-on-failure", "--timeout", "120")
    else:
        build(Path(words[0]), words[1] if len(words) > 1 else "")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} failed with status {error.returncode}")
