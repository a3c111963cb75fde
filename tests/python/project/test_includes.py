"""Dependencies of the core only point down: the includes between folders of csrc/, and the folders that use MPI, NCCL
and CUDA."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[3] / "csrc"
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
# From the bottom up; a folder may always include itself. A new line here is a design decision.
LAYERS: dict[str, set[str]] = {
    "base": set(),
    "kernels": {"base"},
    "kernels/cpu": {"base", "kernels"},
    "kernels/cuda": {"base", "kernels"},
    "topology": {"base"},
    "device": {"base", "kernels"},
    "device/sim": {"base", "device"},
    "device/cuda": {"base", "device", "kernels/cuda"},
    "transport": {"base", "device"},
    "transport/shm": {"base", "transport"},
    "transport/sim": {"base", "transport"},
    "transport/process": {"base", "transport", "transport/shm"},
    "transport/ucx": {"base", "transport"},
    "transport/mpi": {"base", "transport", "transport/process", "transport/ucx"},
    "transport/nccl": {"base", "device"},
    "arena": {"base", "transport"},
    "membership": {"base", "transport"},
    "progress": {"base", "transport"},
    "collectives": {
        *("base", "kernels", "topology", "device", "transport", "transport/nccl", "arena"),
        "progress",  # for the type of a coroutine
    },
    "services": {"base", "kernels", "transport", "arena"},
    "engine": {
        *("base", "device", "transport", "transport/nccl", "arena"),
        *("membership", "progress", "collectives", "services"),
    },
    "bindings": {
        *("base", "kernels", "topology", "device", "device/sim", "device/cuda", "arena"),
        *("transport/sim", "transport/process", "transport/mpi", "transport/ucx", "transport/nccl"),
        *("collectives", "services", "engine"),
    },
}
# External headers, and the folders that may include them. Elsewhere a missing header would need an #ifdef.
FOREIGN = {
    r"mpi(-ext)?\.h": ("transport/mpi",),
    r"nccl(_net)?\.h": ("transport/nccl",),
    r"ucp/.*|ucs/.*": ("transport/ucx",),
    r"(.*/)?(cuda|cu|nv)[a-z_]*\.(h|hpp|cuh)|cub/.*|thrust/.*|cooperative_groups.*": (
        *("kernels/cuda", "device/cuda"),
        "transport/nccl",
    ),
}
GENERATED = {"build_info.h"}  # made by CMake

Include = tuple[str, int, str]
"""A file below csrc/, a line number, and the included path."""


def includes(root: Path, brackets: str) -> Iterator[Include]:
    """Yield the includes of files below `root` between the given brackets, '""' or '<>'."""
    pattern = re.compile(rf"\s*#\s*include\s*{brackets[0]}([^{brackets[1]}]+){brackets[1]}")
    for path in sorted(root.rglob("*")):
        if path.suffix not in SUFFIXES:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := pattern.match(line):
                yield path.relative_to(root).as_posix(), number, found[1]


def folder(path: str) -> str:
    return path.rpartition("/")[0]


def forbidden(root: Path, layers: Mapping[str, set[str]]) -> list[str]:
    """Return includes that the table does not allow, and includes of missing files."""
    wrong = []
    for path, line, target in includes(root, '""'):
        if target in GENERATED:
            continue
        here, there = folder(path), folder(target)
        if not (root / target).is_file():
            wrong.append(f"{path}:{line}: {target} is not a path from csrc/")
        elif here not in layers:
            wrong.append(f"{path}:{line}: {here}/ is not in the table of layers")
        elif there not in layers[here] | {here}:
            wrong.append(f"{path}:{line}: {here}/ must not include {target}")
    return wrong


def foreign(root: Path) -> list[str]:
    """Return external headers that are included in a wrong folder."""
    wrong = []
    for brackets in ('""', "<>"):
        for path, line, target in includes(root, brackets):
            for pattern, places in FOREIGN.items():
                ours = (root / target).is_file()
                if not ours and re.fullmatch(pattern, target) and folder(path) not in places:
                    wrong.append(f"{path}:{line}: <{target}> belongs below {' or '.join(places)}")
    return wrong


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the folders of a cycle, each of which includes the next; empty if there is no cycle."""
    done: set[str] = set()

    def walk(at: str, way: list[str]) -> list[str]:
        if at in way:
            return [*way[way.index(at) :], at]
        if at in done:
            return []
        for below in sorted(edges.get(at, ())):
            if found := walk(below, [*way, at]):
                return found
        done.add(at)
        return []

    return next((found for at in sorted(edges) if (found := walk(at, []))), [])


def edges_of(root: Path) -> dict[str, set[str]]:
    """Return for each folder the folders that it includes."""
    edges: dict[str, set[str]] = defaultdict(set)
    for path, _, target in includes(root, '""'):
        if "/" in target and folder(path) != folder(target):
            edges[folder(path)].add(folder(target))
    return edges


def test_folders_include_what_is_below_them() -> None:
    assert forbidden(CSRC, LAYERS) == []


def test_no_folders_include_each_other() -> None:
    assert circle(edges_of(CSRC)) == []


def test_no_circle_is_allowed() -> None:
    assert circle(LAYERS) == []


def test_the_table_has_no_line_too_many() -> None:
    edges = edges_of(CSRC)
    unused = {here: below - edges.get(here, set()) for here, below in LAYERS.items()}
    assert {here: below for here, below in unused.items() if below} == {}
    assert {folder(path) for path, _, _ in includes(CSRC, '""')} <= set(LAYERS)


def test_headers_of_others_stay_where_they_belong() -> None:
    assert foreign(CSRC) == []
    assert any(target == "mpi.h" for _, _, target in includes(CSRC, "<>"))
    assert any(target == "cuda_runtime.h" for _, _, target in includes(CSRC, "<>"))


PLANTED = {
    "upwards": ("base/error.h", '#include "engine/world.h"', "base/ must not include engine/world.h"),
    "collectives do not know the engine": (
        *("collectives/exchange.cc", '#include "engine/running.h"'),
        "collectives/ must not include engine/running.h",
    ),
    "not from csrc/": ("base/error.h", '#include "error.h"', "error.h is not a path from csrc/"),
    "spaces": ("base/error.h", ' #  include "engine/world.h"', "base/ must not include engine/world.h"),
    "mpi": ("engine/world.cc", "#include <mpi.h>", "<mpi.h> belongs below transport/mpi"),
    "cuda": ("transport/shm/pipes.cc", "#include <cuda_runtime.h>", "<cuda_runtime.h> belongs below kernels/cuda"),
    "nccl": ("collectives/exchange.cc", '#include "nccl.h"', "<nccl.h> belongs below transport/nccl"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_include_is_found(what: str, tmp_path: Path) -> None:
    file, line, message = PLANTED[what]
    root = Path(shutil.copytree(CSRC, tmp_path / "csrc"))
    (root / file).write_text(f"{line}\n{(root / file).read_text()}")
    found = forbidden(root, LAYERS) + foreign(root)
    assert any(one.startswith(f"{file}:1: ") and message in one for one in found), found


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    for here, there in (("a", "b"), ("b", "c/d"), ("c/d", "a")):
        (tmp_path / here).mkdir(parents=True, exist_ok=True)
        (tmp_path / here / "one.h").write_text(f'#include "{there}/one.h"\n')
    assert circle(edges_of(tmp_path)) == ["a", "b", "c/d", "a"]
