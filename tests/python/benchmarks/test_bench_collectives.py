"""The benchmark of collectives: its operations and their checks, its jobs, and reports made only from the JSON."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import report
from results import ResultsOf
from sordino._core import build_info
from sordino.bench import collectives, command_line
from sordino.bench.contestants import launching, operations, tables
from sordino.bench.contestants.launching import CONTESTANTS, PREFIXES, Start
from sordino.bench.contestants.meeting import Meeting, make
from sordino.bench.contestants.rows import best, bimodal, combine, ratio_to_best, rows_to_measure, wrong
from sordino.bench.contestants.targets import distributed_targets, targets, targets_between_hosts
from sordino.errors import NotBuilt, SordinoError, UsageError
from sordino.report import records
from timings.collectives.hosts import contestants

MACHINE: dict[str, Any] = {"cores": 2, "cores_per_rank": 2, "others": 0.03} | dict.fromkeys(
    ("date", "cpu", "kernel", "python", "torch", "sordino", "compiler", "instruction_set", "mpi"), "known"
)
RANKS = 3


# --- Operations -------------------------------------------------------------------------------------------------------


def test_sizes_are_of_the_tensor_that_a_rank_passes_in() -> None:
    found = {one: operations.elements(one, 4096, 4) for one in operations.OPERATIONS}
    assert found["allreduce"] == found["broadcast"] == (1024, 0)
    assert found["allgather"] == (1024, 4096) and found["alltoall"] == (1024, 1024)
    assert found["reducescatter"] == (1024, 256) and found["sendrecv"] == (1024, 1024)
    assert operations.elements("alltoall", 4, 2) == (0, 0)
    assert operations.elements("reducescatter", 64, 3) == (15, 5)
    assert operations.job_bytes("allgather", 1 << 20, 4) == 20 << 20


def test_a_barrier_has_one_row_and_rows_without_elements_are_left_out() -> None:
    rows = rows_to_measure(["alltoall", "barrier"], [4, 64], 2)
    assert rows == [("alltoall", 64), ("barrier", 0)]


def right_result(operation: str, inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Return a rank's result by the definition of the operation."""
    if operation == "allreduce":
        return torch.stack(inputs).sum(0)
    if operation == "broadcast":
        return inputs[0]
    if operation == "allgather":
        return torch.cat(inputs)
    if operation == "sendrecv":
        return inputs[[1, 0, 2][rank]]
    parts = [one.chunk(RANKS)[rank] for one in inputs]
    return torch.cat(parts) if operation == "alltoall" else torch.stack(parts).sum(0)


@pytest.mark.parametrize("operation", operations.OPERATIONS[:-1])
def test_the_check_accepts_the_right_result_only(operation: str) -> None:
    count, _ = operations.elements(operation, 64, RANKS)
    inputs = [torch.empty(count) for _ in range(RANKS)]
    for rank, one in enumerate(inputs):
        operations.fill(operation, one, rank, RANKS)
    for rank in range(RANKS):
        result = right_result(operation, inputs, rank)
        assert operations.is_right(operation, result, rank, RANKS)
        changed = result.clone()
        changed[-1] += 1
        assert not operations.is_right(operation, changed, rank, RANKS)
        assert not operations.is_right(operation, torch.zeros_like(result), rank, RANKS)


# --- Jobs -------------------------------------------------------------------------------------------------------------


def test_ranks_meet_in_shared_memory(tmp_path: Path) -> None:
    make(tmp_path / "meeting", RANKS)

    def rank(number: int) -> list[float]:
        meeting = Meeting(tmp_path / "meeting", number, RANKS)
        found = []
        for turn in range(20):
            meeting.barrier()
            found.append(meeting.maximum(turn * 10.0 + number))
        return found

    with ThreadPoolExecutor(RANKS) as pool:
        assert list(pool.map(rank, range(RANKS))) == [[turn * 10.0 + RANKS - 1 for turn in range(20)]] * RANKS


def test_a_process_knows_its_launcher_and_hides_it_from_jobs() -> None:
    by_mpirun = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1", "HOME": "x"}
    assert launching.started_rank(by_mpirun) == (1, 4)
    assert launching.without_launcher(by_mpirun) == {"HOME": "x"}
    by_sordino = {"SORDINO_RANK": "0", "SORDINO_SIZE": "2", "SORDINO_RENDEZVOUS": "x", "SORDINO_LOG": "debug"}
    assert launching.started_rank(by_sordino) == (0, 2)
    assert launching.without_launcher(by_sordino) == {"SORDINO_LOG": "debug"}
    assert launching.started_rank({"HOME": "x"}) == (0, 0)


def test_only_the_first_rank_of_a_launcher_starts_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    assert collectives.main(["--contestants", "ordinary"]) == 0


def test_a_contestant_that_is_not_installed_has_a_reason(tmp_path: Path) -> None:
    with pytest.raises(NotBuilt, match=r"bin/mpiexec\.hydra; pip install --no-deps .* impi-rt, or .* by --intelmpi"):
        CONTESTANTS["intelmpi"].start(2, PREFIXES | {"intelmpi": tmp_path})


def test_a_job_that_fails_gives_its_error() -> None:
    program = "raise ValueError('no such fabric')"
    with pytest.raises(SordinoError, match="status 1: ValueError: no such fabric"):
        launching.run_job("floor", Start([sys.executable, "-c", program]), 2, [("allreduce", 4)], 0.01)


def test_contestants_are_chosen_by_name() -> None:
    assert launching.parse_names("gloo, Ordinary") == ["ordinary", "gloo"]
    with pytest.raises(UsageError, match="unknown contestant nccl; use some of ordinary, arena"):
        launching.parse_names("nccl")
    with pytest.raises(UsageError, match="unknown operation gather"):
        collectives.main(["--operations", "gather"])
    with pytest.raises(UsageError, match="--format osu prints one contestant, not 11"):
        collectives.main(["--format", "osu"])


def test_nothing_to_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotBuilt, match="--contestants mpich: none is installed"):
        collectives.main(["--quick", "--contestants", "mpich", "--mpich", str(tmp_path)])
    with pytest.raises(UsageError, match="--operations alltoall --sizes 4: nothing is left to measure"):
        collectives.main(["--quick", "--operations", "alltoall", "--sizes", "4"])


def test_hosts_have_a_rate_in_a_clone_only() -> None:
    assert command_line.parse_mbps("10gbit") == 10_000 and command_line.parse_mbps("2.5Gbit") == 2500
    assert command_line.parse_mbps("100mbit") == 100
    with pytest.raises(UsageError, match="'10' is not a rate"):
        collectives.main(["--hosts", "2", "--rate", "10"], contestants)
    with pytest.raises(NotBuilt, match="need a clone"):
        collectives.main(["--hosts", "2"])
    with pytest.raises(UsageError, match="add --hosts N"):
        collectives.main(["--rate", "10gbit"], contestants)
    with pytest.raises(UsageError, match="as many on each host"):
        collectives.main(["--hosts", "2", "--ranks", "5"], contestants)
    with pytest.raises(UsageError, match="unknown contestant floor; use some of ordinary"):
        collectives.main(["--hosts", "2", "--contestants", "floor"], contestants)


# --- Results ----------------------------------------------------------------------------------------------------------


def job(operation: str, size: int, *of_ranks: float) -> dict[str, Any]:
    """Return the result of a job with one row, whose ranks had these mean times."""
    row = {"operation": operation, "bytes": size, "right": True, "slowest": max(of_ranks), "of_ranks": list(of_ranks)}
    return {"version": "5", "rows": [row | {"calls": 100}]}


def row(operation: str, size: int, **medians: float) -> dict[str, Any]:
    """Return a row in which both jobs of each contestant took the same time."""
    return combine({name: [job(operation, size, median)] * 2 for name, median in medians.items()})[0]


def test_jobs_are_combined_by_medians() -> None:
    jobs = [job("allreduce", 4, 1e-6, 3e-6), job("allreduce", 4, 1e-6, 2e-6), job("allreduce", 4, 1e-6, 9e-6)]
    rows = combine({"ordinary": jobs, "gloo": jobs[:2]})
    entry = rows[0]["contestants"]["ordinary"]
    assert (entry["median"], entry["least"], entry["most"], entry["count"]) == (3e-6, 2e-6, 9e-6, 3)
    assert (entry["fastest"], entry["average"], entry["slowest"]) == pytest.approx((1e-6, 2e-6, 3e-6))
    assert [name for _, name in bimodal(rows)] == ["ordinary"]  # 9 / 2; Gloo's jobs differ by 3 / 2 only
    assert wrong(rows) == []
    jobs[1]["rows"][0]["right"] = False
    assert wrong(combine({"ordinary": jobs})) == ["ordinary: allreduce of 4 B"]


def test_the_best_peer_is_named() -> None:
    found = row("allgather", 64, ordinary=2e-6, openmpi=3e-6, intelmpi=1e-6, floor=1e-9)
    assert best(found) == "intelmpi"
    assert ratio_to_best(found, "ordinary") == (0.5, "intelmpi")
    assert ratio_to_best(found, "ordinary", ("openmpi",)) == (1.5, "openmpi")
    assert ratio_to_best(found, "arena") is None


def test_targets_take_the_worst_size() -> None:
    rows = [
        row("allreduce", 4, ordinary=1e-6, asynchronous=10e-6, openmpi=0.9e-6),
        row("allreduce", 4096, ordinary=1e-6, arena=1e-6, openmpi=2e-6, gloo=0.5e-6),
        row("allreduce", 1 << 20, ordinary=1e-4, arena=1e-4, openmpi=2e-4),
        row("allreduce", 1 << 26, ordinary=1e-2, arena=2e-2, openmpi=3e-2),
        row("allgather", 64, ordinary=1e-6, gloo=1e-5),
        row("barrier", 0, ordinary=1e-6, mpich=1e-6, gloo=1e-9),
    ]
    assert {one["what"]: one["met"] for one in targets(rows, 2)} == {
        "allreduce 4 B, ordinary: best peer over Sordino (worst: openmpi at 4 B)": True,
        "allreduce above 4 B, ordinary: best peer over Sordino (worst: gloo at 4 KiB)": False,
        "allreduce from 4 KiB to below 1 MiB, arena: best peer over Sordino (worst: gloo at 4 KiB)": False,
        "allreduce from 1 MiB, arena: best peer over Sordino (worst: openmpi at 64 MiB)": False,
        "allreduce 4 B, asynchronous: 12 µs over its time": True,
        "allgather 64 B to 64 KiB, ordinary: best MPI over Sordino": None,
        "barrier, ordinary: best MPI over Sordino (worst: mpich)": True,
    }
    assert [one["what"].split(",")[0] for one in targets(rows, 8)] == ["allgather 64 B to 64 KiB", "barrier"]


def test_targets_of_torch_distributed_are_against_gloo() -> None:
    rows = [
        row("sendrecv", 4096, distributed=1e-6, gloo=3e-5, openmpi=1e-7),
        row("allreduce", 1 << 26, distributed=1e-2, gloo=4e-2),
    ]
    met = {one["what"]: one["met"] for one in distributed_targets(rows) if one is not None}
    assert met == {
        "sendrecv 64 B to 64 KiB, distributed: gloo over Sordino (worst: gloo at 4 KiB)": True,
        "allreduce 64 MiB, distributed: gloo over Sordino (worst: gloo at 64 MiB)": False,
    }


def test_targets_between_hosts_are_of_each_size() -> None:
    rows = [
        row("allgather", 64 << 10, ordinary=2e-6, over_mpi=1e-6, gloo=1e-6, openmpi=3e-6),
        row("allgather", 16 << 20, ordinary=1e-2, mpich=1e-2),
        row("barrier", 0, ordinary=1e-6, gloo=1e-9),
    ]
    assert [(one["what"], one["met"]) for one in targets_between_hosts(rows)] == [
        ("allgather 64 KiB, ordinary: best peer over Sordino (worst: gloo at 64 KiB)", False),
        ("allgather 16 MiB, ordinary: best peer over Sordino (worst: mpich at 16 MiB)", True),
    ]
    text = tables.markdown(example() | {"hosts": 2, "mbps": 10_000.0})
    assert "2 ranks on 2 emulated hosts with links of 10000 Mbps." in text


def example() -> dict[str, Any]:
    rows = [
        row("allreduce", 64 << 20, ordinary=2e-2, arena=8e-3, openmpi=40e-3, floor=6e-3),
        row("barrier", 0, ordinary=1e-6, openmpi=2e-6),
    ]
    rows[1]["contestants"]["openmpi"] |= {"jobs": [2e-6, 9e-6], "most": 9e-6}
    names = ("ordinary", "arena", "openmpi", "horovod", "floor")
    results: dict[str, Any] = {"benchmark": "collectives", "name": "collectives_np2", "machine": MACHINE, "ranks": 2}
    results |= {"jobs": 2, "rows": rows, "wrong": [], "targets": targets(rows, 2), "left_out": []}
    results["labels"] = {name: CONTESTANTS[name].label for name in names}
    return results | {"baselines": {"Open MPI": "v5", "Horovod": "not found (horovod is not installed)"}}


def test_a_report_is_made_from_the_json_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = records.write(example(), tmp_path / "new")
    assert path is not None and report.main([str(path)]) == 0
    text = path.with_suffix(".md").read_text()
    assert "Horovod not found (horovod is not installed)" in text and "used 0.03 cores." in text
    assert "5.00× (Open MPI)" in text and "2.00× (Open MPI)" in text
    assert "- barrier –, Open MPI: 2, 9 µs" in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    names = ["collectives_np2.json", "collectives_np2.md", "collectives_np2.png"]
    assert sorted(one.name for one in path.parent.iterdir()) == names


def test_the_format_of_osu_has_its_columns() -> None:
    lines = tables.osu(example(), "ordinary").splitlines()
    assert lines[0] == "# OSU MPI Allreduce Latency Test (format; measured: Sordino, ordinary memory)"
    assert lines[1].split("  ")[0] == "# Size" and "Avg Latency(us)" in lines[1]
    assert lines[2].split() == ["67108864", "20000.00", "20000.00", "20000.00", "200"]
    assert lines[-1].split() == ["1.00", "1.00", "1.00", "200"]  # the barrier has no size


# --- Short runs -------------------------------------------------------------------------------------------------------


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("launcher")
def test_collectives_run(tmp_path: Path, results_of: ResultsOf) -> None:
    words = ["-np", "2", "collectives", "--quick", "--sizes", "4,4KiB", "--contestants", "ordinary,openmpi,alone,floor"]
    command = [sys.executable, "-m", "sordino.cli", "bench", *words, "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = results_of("collectives_np2")
    assert found["ranks"] == 2 and found["wrong"] == []
    rows = {(one["operation"], one["bytes"]): one["contestants"] for one in found["rows"]}
    assert len(rows) == 11  # alltoall and reducescatter of 4 B have no elements
    assert rows.pop(("barrier", 0)).keys() == {"ordinary", "openmpi", "alone"}
    assert all(one.keys() - {"alone"} == {"ordinary", "openmpi", "floor"} for one in rows.values())


@pytest.mark.run_of_a_benchmark
def test_other_contestants_of_sordino_and_gloo_run(tmp_path: Path, results_of: ResultsOf) -> None:
    words = ["--quick", "--sizes", "4KiB", "--contestants", "arena,asynchronous,distributed,gloo,horovod"]
    assert collectives.main([*words, "--results", str(tmp_path)]) == 0
    found = results_of("collectives_np2")
    assert found["baselines"]["Horovod"].startswith("not found")
    assert found["rows"][0]["contestants"].keys() == {"arena", "asynchronous", "distributed", "gloo"}


@pytest.mark.run_of_a_benchmark
@pytest.mark.usefixtures("emulated_hosts")
@pytest.mark.skipif(not build_info()["ucx"], reason="this build has no UCX")
def test_collectives_run_on_hosts(tmp_path: Path, results_of: ResultsOf) -> None:
    words = ["--quick", "--hosts", "2", "--rate", "1gbit", "--sizes", "4KiB,1MiB", "--results", str(tmp_path)]
    assert collectives.main([*words, "--contestants", "ordinary,distributed,over_mpi,openmpi,gloo"], contestants) == 0
    found = results_of("collectives_hosts2x2")
    assert (found["ranks"], found["hosts"], found["mbps"], found["wrong"]) == (4, 2, 1000, [])
    rows = {(one["operation"], one["bytes"]): one["contestants"] for one in found["rows"]}
    names = {"ordinary", "distributed", "over_mpi", "openmpi", "gloo"}
    assert all(one.keys() == names for one in rows.values())
    # Both blocks of the other host cross the link, at 1 Gbps.
    assert all(one["least"] > 0.9 * 2 * 8 * (1 << 20) / 1e9 for one in rows["allgather", 1 << 20].values())
