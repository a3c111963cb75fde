"""Number of ranks that `sordino run` starts: the capacity of the hosts is the limit, checked before anything starts."""

from __future__ import annotations

import argparse
import itertools
import resource
from collections.abc import Sequence
from pathlib import Path

import pytest

from sordino import _core
from sordino.cli import run, run_elastic
from sordino.cli.app import main
from sordino.errors import UsageError
from sordino.launcher import capacity, mpi
from sordino.launcher.capacity import Machine

TWO_CORES = Machine(2, 16 << 30)


@pytest.fixture
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*_: object) -> mpi.Launcher:
        raise AssertionError("a launcher was looked for")

    monkeypatch.setattr(mpi, "find_launcher", find)


@pytest.mark.usefixtures("_nothing_starts")
@pytest.mark.parametrize(
    "words",
    [
        ["run", "-np", "99999999999", "--", "true"],
        ["run", "-np", "99999999999", "--oversubscribe", "--", "true"],
        ["run", "-np", "99999999999", "--mpi-args", "--hostfile h", "--", "true"],
        ["run", "-np", "99999999999", "--hosts", "a:4,b:4", "--", "true"],
        ["bench", "-np", "99999999999", "collectives"],
        ["plan", "-np", "99999999999"],
    ],
    ids=" ".join,
)
def test_nonsense_is_refused_before_anything_starts(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "-np 99999999999: " in capsys.readouterr().err


@pytest.mark.usefixtures("_nothing_starts")
def test_so_are_nonsensical_slots(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--hosts", "a:99999999999", "--", "true"]) == 2
    assert "a:99999999999 has more slots than any machine has cores (1024)" in capsys.readouterr().err


@pytest.mark.usefixtures("_nothing_starts")
def test_a_batch_systems_hosts_are_none_of_the_local_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PBS_NODEFILE", "nodes")
    monkeypatch.setattr(capacity, "this_machine", lambda: TWO_CORES)
    assert main(["run", "-np", "9", "--", "true"]) == 2
    assert "room for 8 ranks on this machine" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="looked for"):
        main(["run", "-np", "9", "--launcher", "mpi", "--", "true"])


@pytest.mark.usefixtures("_nothing_starts")
@pytest.mark.parametrize("grace", ["-1", "nan", "inf", "1e6"])
def test_a_grace_that_is_none(grace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-np", "1", f"--grace={grace}", "--", "true"]) == 2
    assert "must be from 0 to 86400 seconds" in capsys.readouterr().err


def most(
    here: Machine, hosts: Sequence[str] = (), environment: dict[str, str] | None = None, oversubscribe: bool = False
) -> int:
    """Return the largest number of ranks that is not refused."""
    for ranks in itertools.count(1):
        try:
            capacity.check(ranks, hosts, [], environment or {}, here, oversubscribe)
        except UsageError:
            return ranks - 1
    raise AssertionError


@pytest.mark.parametrize(
    ("here", "without", "oversubscribed"),
    [
        (TWO_CORES, 8, 128),
        (Machine(1, 16 << 30), 8, 64),
        (Machine(16, 64 << 30), 64, 655),
        (Machine(2, 512 << 20), 5, 5),  # memory is the limit in either case
        (Machine(2, 1 << 20), 1, 1),
    ],
)
def test_cores_and_memory(here: Machine, without: int, oversubscribed: int) -> None:
    assert (most(here), most(here, oversubscribe=True)) == (without, oversubscribed)


def test_hosts_add_up() -> None:
    assert most(TWO_CORES, ["a", "b:8"]) == 8 + 32
    assert most(TWO_CORES, ["localhost:50"]) == 8
    assert most(TWO_CORES, environment={"SLURM_JOB_NUM_NODES": "3"}) == 24


def test_hosts_that_mpirun_hears_of_elsewhere_are_not_judged_by_this_machine() -> None:
    for extra, environment in (
        (["--hostfile", "h"], {}),
        (["-H", "a:64"], {}),
        (["--host=a:64"], {}),
        ([], {"PBS_NODEFILE": "h"}),
    ):
        capacity.check(64, [], extra, environment, TWO_CORES, False)
        with pytest.raises(UsageError, match="the limit is 65536 ranks"):
            capacity.check(65537, [], extra, environment, TWO_CORES, True)
    with pytest.raises(UsageError, match="room for 8"):
        capacity.check(64, [], ["--map-by", "core"], {}, TWO_CORES, False)


def test_the_refusal_says_what_there_is_and_the_mend() -> None:
    with pytest.raises(UsageError) as caught:
        capacity.check(9, [], [], {}, TWO_CORES, False)
    assert str(caught.value) == (
        "-np 9: there is room for 8 ranks on this machine (2 cores and 16.0 GiB): 4 per core, at least 8, each with "
        "100 MiB of memory; take fewer, or --oversubscribe, which allows 128"
    )
    with pytest.raises(UsageError, match=r"64 per core, each with 100 MiB of memory; take fewer$"):
        capacity.check(129, [], [], {}, TWO_CORES, True)


@pytest.mark.parametrize(
    ("hard", "ranks", "most"),
    [(resource.RLIM_INFINITY, 2, 1024), (1 << 20, 2, 1024), (1024, 2, 240), (40, 2, 2)],
)
def test_an_elastic_job_has_at_most_the_processes_for_which_files_can_be_opened(
    monkeypatch: pytest.MonkeyPatch, hard: int, ranks: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, hard))
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    words = ["-np", str(ranks), "--host-discovery-script", "x"]
    for more, expected in (([], most), (["--max-np", "1000"], 1000)):
        limits = run_elastic.check(parser.parse_args([*words, *more, "true"]))
        assert limits is not None and limits.most == expected


def test_this_machine() -> None:
    here = capacity.this_machine()
    assert here.cores >= 1
    assert here.memory is not None and here.memory > 1 << 20
    assert here.most(False) >= 1


GIB = 1 << 30
# By name: lines of /proc/self/cgroup, files of /sys/fs/cgroup, allowed bytes, and available bytes on a machine with 64
# GiB.
GROUPS: dict[str, tuple[str, dict[str, str], int | None, int]] = {
    "none": ("0::/", {}, None, 64 * GIB),
    "no file": ("", {}, None, 64 * GIB),
    "version 2": ("0::/job", {"job/memory.max": f"{4 * GIB}", "job/memory.current": f"{GIB}"}, 4 * GIB, 3 * GIB),
    "cached files make room": (
        "0::/",
        {
            "memory.max": f"{4 * GIB}",
            "memory.current": f"{3 * GIB}",
            "memory.stat": f"anon {GIB}\nactive_file {GIB}\ninactive_file {GIB // 2}",
        },
        4 * GIB,
        4 * GIB - 3 * GIB // 2,
    ),
    "nested": (
        "0::/batch/job/step",
        {
            "batch/job/step/memory.max": "max",
            "batch/job/memory.max": f"{8 * GIB}",
            "batch/job/memory.current": f"{7 * GIB}",
            "batch/memory.max": f"{6 * GIB}",
            "batch/memory.current": f"{2 * GIB}",
        },
        6 * GIB,
        GIB,
    ),
    "version 1": (
        "11:cpu,cpuacct:/other\n4:memory:/job\n0::/unified",
        {
            "memory/job/memory.limit_in_bytes": f"{5 * GIB}",
            "memory/job/memory.usage_in_bytes": f"{2 * GIB}",
            "memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
            "memory/memory.limit_in_bytes": "9223372036854771712",
        },
        5 * GIB,
        4 * GIB,
    ),
    "without a namespace": (
        "0::/docker/0123/inner",
        {"memory.max": f"{2 * GIB}", "memory.current": f"{GIB}"},
        2 * GIB,
        GIB,
    ),
    "more is used than allowed": (
        "0::/", {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}, GIB, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_what_control_groups_allow(tmp_path: Path, name: str) -> None:
    """The core, which must not use more than the limit, and the launcher read the same values."""
    lines, files, allowed, available = GROUPS[name]
    written = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * GIB >> 10} kB\n"}
    if lines:
        written["proc/self/cgroup"] = lines + "\n"
    for path, text in (written | {f"sys/fs/cgroup/{file}": text for file, text in files.items()}).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert _core.limits(str(tmp_path)) == {"memory": allowed, "available_memory": available}
    total = capacity.this_machine("/nowhere").memory
    assert total is not None
    assert capacity.this_machine(str(tmp_path)).memory == (total if allowed is None else min(total, allowed))


def test_commands_that_start_ranks_have_the_options_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(run, "main", lambda options: seen.append(options) or 0)
    assert main(["bench", "-np", "2", "fusion"]) == 0
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    assert vars(seen[0]).keys() == vars(parser.parse_args([])).keys()
