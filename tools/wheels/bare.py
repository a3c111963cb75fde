"""Tries a wheel on bare systems: Debian by debootstrap, with Python and neither a compiler nor an MPI (needs root).

    python tools/wheels/bare.py [--suite bookworm] [--older bullseye] [WHEEL]

Installs the wheel and what examples/train.py needs, asks `sordino doctor`, trains on 4 ranks, and says how long each
took. What pip needs is downloaded before, so that no time is the network's. On the older system, whose Python may be
too old for the wheel, its libraries are loaded with all that they need.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheels"
PACKAGES = "ca-certificates,python3,python3-venv"
ABSENT = "for tool in cc gcc g++ c++ clang nvcc mpicc mpirun mpiexec make cmake; do ! command -v $tool || exit 1; done"
LOAD = """
import ctypes, os, platform, sys
for path in sys.argv[1:]:
    ctypes.CDLL(path, mode=os.RTLD_NOW)
    print(os.path.basename(path), "loads with", *platform.libc_ver())
"""
TAG = "import sys; print('cp%d%d' % sys.version_info[:2])"


def system(suite: str) -> Path:
    """The folder of a bare system, made if it is not there."""
    folder = WORK / f"bare-{suite}"
    if not (folder / ".made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        WORK.mkdir(parents=True, exist_ok=True)
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, folder], check=True)
        (folder / ".made").touch()
    return folder


def inside(folder: Path, command: str) -> str:
    """Run a shell command in the system, with /proc and /dev of its own mount namespace; return what it prints."""
    mounts = f"mount -t proc proc {folder}/proc && mount --rbind /dev {folder}/dev"
    words = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec chroot {folder} /bin/sh -ec "$0"', command]
    path = "/root/try/venv/bin:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(words, env={"PATH": f"{path}:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8"}, text=True,
                          stdout=subprocess.PIPE)  # fmt: skip
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        raise SystemExit(f"bare.py: `{command}` has failed on the bare system")
    return done.stdout


def load(suite: str, wheel: Path) -> None:
    """Load the libraries that need no more than a system has, on an older one."""
    folder = system(suite)
    place = folder / "root" / "try"
    shutil.rmtree(place, ignore_errors=True)
    with zipfile.ZipFile(wheel) as file:
        libraries = [name for name in file.namelist() if re.fullmatch(r"sordino/libsordino(_cuda)?\.so", name)]
        for name in libraries:
            file.extract(name, place)
    (place / "load.py").write_text(LOAD)
    inside(folder, "python3 /root/try/load.py " + " ".join(f"/root/try/{name}" for name in sorted(libraries)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", nargs="?", type=Path, help="default: the one in dist/ for the system's Python")
    parser.add_argument("--suite", default="bookworm", help="of Debian (default: bookworm)")
    parser.add_argument("--older", default="bullseye", help="on which its libraries must load (default: bullseye)")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise SystemExit("bare.py: needs root and debootstrap (`apt-get install debootstrap`)")
    folder = system(options.suite)
    tag = inside(folder, f'python3 -c "{TAG}"').strip()
    wheels = [options.wheel] if options.wheel else sorted((ROOT / "dist").glob(f"*-{tag}-*.whl"))
    if not wheels:
        raise SystemExit(f"bare.py: dist/ has no wheel for {tag}, the Python of {options.suite}: `make wheel`")
    wheel = wheels[-1]

    place = folder / "root" / "try"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    downloads = WORK / f"packages-{tag}"
    pip = [WORK / tag / "bin" / "python", "-m", "pip", "download", "--quiet", "-d", downloads]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", wheel, "scikit-learn"], check=True)
    shutil.copytree(downloads, place / "packages")
    shutil.copy(wheel, place)

    inside(folder, ABSENT)
    took = {}
    for name, command in {
        "venv": "python3 -m venv venv",
        "pip install": f"pip install --quiet --no-index --find-links packages ./{wheel.name} scikit-learn",
        "sordino doctor": "sordino doctor",
        "sordino examples": "sordino examples minimal && sordino examples train",
        "a whole training": "sordino run -np 4 -- python minimal.py",
        "the demo": "sordino run -np 4 -- python train.py --algorithm allreduce",
    }.items():
        begin = time.monotonic()
        inside(folder, f"cd /root/try; {command}")
        took[name] = time.monotonic() - begin
    print(f"{options.suite}, {wheel.name}: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in took.items()))
    load(options.older, wheel)
    if took["the demo"] > 60:
        raise SystemExit("bare.py: the demo has taken longer than a minute")
    return 0


if __name__ == "__main__":
    sys.exit(main())
