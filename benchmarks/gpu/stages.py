"""Stages of the check on a GPU: command, needs and expected time of each, and their division into calls."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CORES_BESIDE = 12  # least cores on which stages run at the same time
BUILD_AGAIN_S = 20  # expected, with the build tree of an earlier call
RANKS = "tests/gpu/test_gpu_ranks.py"
PRETENDED = "tests/mp/test_gpu_worker.py"

# Placeholders of commands (`check.Place.known`): {python}, {work}, {out}, {architecture}, {nccl}, {quick}.
PYTEST = "{python} -m pytest -v --tier all -p no:cacheprovider"
SANITIZER = "compute-sanitizer --error-exitcode 86 --print-limit 20 --tool"
HOST_KERNELS = " ".join(f"tests/python/core/test_{name}.py" for name in ("kernels", "unchanged", "codecs"))
DISTRIBUTED, JOINS = "tests/gpu/test_cuda_distributed.py", "tests/gpu/test_gpu_joins.py"
KERNELS = f"tests/gpu --ignore={RANKS} --ignore={DISTRIBUTED} --ignore={JOINS} -m 'gpu and not large'"
RACES = "-k '(reduce or sums or elements or samples) and float32 or selected or (few and (13-of or int4-128))'"
ADDRESSES = "-k 'float32 or (edges and 128)'"
RUN_2 = "{python} -m sordino.cli run --launcher local -np 2 -- {python}"
NCCL = "{python} -m benchmarks.gpu.nccl"
# NCCL's experimental mode for several ranks on one GPU. It needs few channels. Only rings and one protocol are built.
SHARED_GPU = {
    "SORDINO_NCCL": "{work}/nccl/build/lib/libnccl.so.2",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Stage:
    """A stage.

    Attributes:
        name: name of the stage and of its log.
        seconds: expected time; on a GPU the stage is ended after twice that.
        command: command of the stage.
        needs: requirements, as in `check.Place.lacks`.
        dry: command without a GPU, or empty.
        instead: description of the command `dry` for the page.
        environment: environment variables to set.
        beside: whether it may run beside other such stages: it tests no times, or with wide limits.
    """

    name: str
    seconds: int
    command: str
    needs: tuple[str, ...] = ("a build", "a GPU")
    dry: str = ""
    instead: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: bool = False


def collected(words: str) -> str:
    """Return the command that lists the tests that these words select. It fails if they select none."""
    return f"{PYTEST} --collect-only {words}"


STAGES = (
    Stage("build", 180, "{python} -m benchmarks.gpu.build {work} {architecture}", (),
          "{python} -m benchmarks.gpu.build {work} {architecture}", "for sm_90 where there is an nvcc"),
    Stage("ctest", 40, "{python} -m benchmarks.gpu.build --ctest {work}", ("a build",),
          "{python} -m benchmarks.gpu.build --ctest {work}", "as on a GPU"),
    Stage("nccl_build", 240, f"{NCCL} {{work}}/nccl {{nccl}} {{architecture}}", ("a GPU", "NCCL's source"),
          f"{NCCL} --try {{work}}/nccl {{nccl}}", "unpacked and generated, not compiled"),
    Stage("kernels", 100, f"{PYTEST} {KERNELS}",
          dry=f"{PYTEST} {HOST_KERNELS}", instead="the host's kernels", beside=True),
    Stage("distributed", 90, f"{PYTEST} {DISTRIBUTED}",
          dry=f"{PYTEST} tests/mp/test_distributed.py -k 'every_operation and 2'", instead="on the host", beside=True),
    Stage("joins", 60, f"{PYTEST} {JOINS}",
          dry=f"{PYTEST} tests/faults/test_join.py -k 'is_replaced and local'", instead="on the host", beside=True),
    Stage("one_rank", 60, f"{PYTEST} {RANKS} -k 1-on1",
          dry=f"{PYTEST} {PRETENDED} -k 1-pretended", instead="a simulated device", beside=True),
    Stage("two_ranks", 110, f"{PYTEST} {RANKS} -k 2-on1",
          dry=f"{PYTEST} {PRETENDED} -k 2-pretended", instead="a simulated device", beside=True),
    Stage("lost_ranks", 80, f"{PYTEST} {RANKS} -k lost",
          dry=f"{PYTEST} {PRETENDED} -k lost", instead="a simulated device", beside=True),
    Stage("four_ranks", 110, f"{PYTEST} {RANKS} -k 4-on1",
          dry=f"{PYTEST} {PRETENDED} -k '4-pretended and way'", instead="a simulated device", beside=True),
    Stage("racecheck", 80, f"{SANITIZER} racecheck {PYTEST} -x {KERNELS} {RACES}",
          ("a build", "a GPU", "compute-sanitizer"), collected(f"{KERNELS} {RACES}"), "not run", beside=True),
    Stage("memcheck", 40, f"{SANITIZER} memcheck {PYTEST} -x {KERNELS} {ADDRESSES}",
          ("a build", "a GPU", "compute-sanitizer"), collected(f"{KERNELS} {ADDRESSES}"), "not run",
          {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, beside=True),
    Stage("nccl_ranks", 60, f"{PYTEST} {RANKS} -k '2-on1 and nccl'",
          ("a build", "a GPU", "an NCCL for shared GPUs"),
          f"{PYTEST} tests/python/test_device_checks.py -k nccl --slice 1/12", "NCCL's stand-in", SHARED_GPU,
          beside=True),
    Stage("two_gpus", 120, f"{PYTEST} {RANKS} -k 2-on2", ("a build", "two GPUs"),
          collected(f"{RANKS} -k 2-on2"), "not run", beside=True),
    Stage("memory", 30, f"{PYTEST} {RANKS} -k '2-on1 and memory_does_not_grow'",
          dry=collected(f"{RANKS} -k '2-on1 and memory_does_not_grow'"), instead="not run"),
    Stage("large", 20, f"{PYTEST} tests/gpu -m 'gpu and large'",
          dry=collected("tests/gpu -m 'gpu and large'"), instead="not run"),
    Stage("gpu_kernels", 120, "{python} benchmarks/gpu_kernels.py {quick} --results {out}",
          dry="{python} benchmarks/gpu_kernels.py --pretend", instead="the host's kernels"),
    Stage("gpu_ranks", 60, f"{RUN_2} benchmarks/gpu_ranks.py {{quick}} --results {{out}}",
          dry=f"{RUN_2} benchmarks/gpu_ranks.py --pretend", instead="a simulated device"),
    Stage("gpu_step", 90, f"{RUN_2} benchmarks/gpu_step.py {{quick}} --results {{out}}",
          dry=f"{RUN_2} benchmarks/gpu_step.py --pretend", instead="a simulated device"),
    Stage("gpu_step_alone", 60, "{python} benchmarks/gpu_step.py {quick} --results {out}",
          dry="{python} benchmarks/gpu_step.py --pretend", instead="a simulated device"),
)  # fmt: skip


def groups(stages: Sequence[Stage], cores: int) -> list[list[Stage]]:
    """Divide stages, in their order, into groups that run one after the other. The stages of a group run together."""
    found: list[list[Stage]] = []
    for stage in stages:
        if cores >= CORES_BESIDE and stage.beside and found and found[-1][0].beside:
            found[-1].append(stage)
        else:
            found.append([stage])
    return found


def named(names: Sequence[str]) -> list[Stage]:
    """Return the named stages in the order of the table, or all if no name is given. ValueError for an unknown name."""
    known = [stage.name for stage in STAGES]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--stages: there is no stage {', '.join(unknown)}; there are {' '.join(known)}")
    return [stage for stage in STAGES if stage.name in names or not names]


def plan(stages: Sequence[Stage], budget: int) -> list[list[Stage]]:
    """Divide stages into calls of at most `budget` expected seconds each, in their order.

    Each call builds first, which is fast with the build tree of an earlier call. ValueError if a stage does not fit.
    """
    build = STAGES[0]
    calls: list[list[Stage]] = [[build]]
    spent = build.seconds
    for stage in stages:
        if stage is build:
            continue
        if spent + stage.seconds > budget and len(calls[-1]) > 1:
            calls.append([build])
            spent = BUILD_AGAIN_S
        spent += stage.seconds
        if spent > budget:
            raise ValueError(
                f"--budget {budget}: {stage.name} is expected to take {stage.seconds} s, with the build {spent}"
            )
        calls[-1].append(stage)
    return calls


def expected(call: Sequence[Stage], first: bool) -> int:
    """Return the expected seconds of a call."""
    return sum(stage.seconds for stage in call[1:]) + (call[0].seconds if first else BUILD_AGAIN_S)


def words(command: str, known: Mapping[str, str]) -> list[str]:
    """Split a command as a shell would, and fill in the placeholders. Words that become empty are left out."""
    found = (re.sub(r"\{(\w+)\}", lambda match: known[match[1]], word) for word in shlex.split(command))
    return [word for word in found if word]
