"""All collective operations of Sordino, and messages between two ranks, each contestant alone in its own jobs.

Contestants are MPI, Gloo, Horovod and memory traffic.

  python benchmarks/collectives.py --ranks 2
  python benchmarks/collectives.py --operations allgather,barrier --sizes 64,4KiB,1MiB --contestants ordinary,mpich
  python benchmarks/collectives.py --contestants ordinary --format osu
  python benchmarks/collectives.py --hosts 2 --rate 10gbit          # as root, in a clone

This process starts the jobs: `sordino run` starts Sordino, mpirun or mpiexec.hydra the MPIs (through mpi4py), and
torchrun Gloo. Under another launcher (mpirun -np 2 python benchmarks/collectives.py) rank 0 does this for the same
number of ranks, and the other ranks end at once. Contestants:
  ordinary      blocking calls of Sordino on ordinary tensors
  arena         the same on tensors of hvd.shared_empty
  asynchronous  Sordino's asynchronous calls, each followed by hvd.synchronize
  distributed   calls of torch.distributed with the backend "sordino"
  openmpi, mpich, intelmpi, gloo, horovod
  alone         the calls of `ordinary`, each rank in a process set of its own: the time of a call by itself
  floor         memory traffic that cannot be avoided, in private memory and without communication
On emulated hosts (--hosts), Sordino runs over UCX, and as `over_mpi` over Open MPI; each job has hosts of its own.
A contestant that is not installed is reported with the reason. MPICH and Intel MPI have files of the same names as
Open MPI, so they are installed apart: pip install --no-deps --prefix .venv/impi impi-rt

A size is the bytes of the tensor that a rank passes in: for allreduce, broadcast, reducescatter and alltoall its whole
tensor, for allgather its part of the result, which has the size times the ranks. All data is float32, and reductions
are sums. Each result is checked once per size and job. Each job measures all rows; the order of contestants changes
from job to job. `worker.py` describes how a job measures.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sordino.bench import command_line
from sordino.bench.contestants import launching, tables
from sordino.bench.contestants.launching import CONTESTANTS, PREFIXES, Contestant, Start
from sordino.bench.contestants.operations import OPERATIONS, job_bytes
from sordino.bench.contestants.rows import OURS, PEERS, combine, rows_to_measure, wrong
from sordino.bench.contestants.targets import targets, targets_between_hosts
from sordino.bench.report import REPORTS
from sordino.errors import NotBuilt, SordinoError, UsageError
from sordino.report import Results, machines, records
from sordino.report.tables import format_bytes
from sordino.timing import Participants, Watch, rotated

SIZES = "4,64,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
SIZES_ON_HOSTS = "4,4KiB,64KiB,1MiB,16MiB"
_QUICK_SIZES = "4,4KiB,1MiB"
_BUDGET_S, _QUICK_BUDGET_S = 0.1, 0.005
_MEMORY = 0.4  # part of the machine's memory that the buffers of a row may take
_ON_HOSTS = "ordinary,distributed,over_mpi,openmpi,mpich,gloo"

OnHosts = Callable[[int, float | None], Mapping[str, Contestant]]
"""Function of the number of hosts and of the Mbps of their links that returns the contestants there."""


def _parser() -> argparse.ArgumentParser:
    options = command_line.parser("collectives", __doc__, _BUDGET_S, "row and job")
    options.add_argument(
        "--ranks", type=int, metavar="N", help="number of ranks (default 2, per host; or the launcher's)"
    )
    options.add_argument(
        "--hosts", type=int, metavar="N", help="number of emulated hosts (default: this machine alone)"
    )
    options.add_argument(
        "--rate", metavar="RATE", help="rate of each host's link, such as 10gbit or 100mbit (default: unlimited)"
    )
    options.add_argument(
        "--sizes", metavar="LIST", help=f"bytes of a rank's tensor (default {SIZES}; on hosts {SIZES_ON_HOSTS})"
    )
    options.add_argument(
        "--operations", default=",".join(OPERATIONS), metavar="LIST", help=f"default {','.join(OPERATIONS)}"
    )
    options.add_argument("--contestants", metavar="LIST", help=f"default {','.join(CONTESTANTS)}; on hosts {_ON_HOSTS}")
    options.add_argument("--jobs", type=int, metavar="N", help="jobs of each contestant (default 5; 1 with --quick)")
    options.add_argument(
        "--format", choices=("markdown", "osu"), default="markdown",
        help="osu: print one contestant's times like the OSU micro-benchmarks, and write files only with --results",
    )  # fmt: skip
    for name, prefix in PREFIXES.items():
        place = "this Python's" if prefix == PREFIXES["openmpi"] else f"{prefix.name} in this Python's"
        options.add_argument(
            f"--{name}", type=Path, default=prefix, metavar="DIR", help=f"installation (default: {place})"
        )
    return options


def main(argv: Sequence[str] | None = None, on_hosts: OnHosts | None = None) -> int:
    """Run the benchmark. Return status 1 if a contestant had a wrong result, or a job of Sordino failed.

    Args:
        argv: arguments of the command; None: those of this process.
        on_hosts: function that returns the contestants on emulated hosts, which only a clone has.

    Raises:
        UsageError: an argument is out of range.
        NotBuilt: hosts are asked for, and this is no clone.
    """
    chosen = _parser().parse_args(argv)
    rank, launched = launching.started_rank(os.environ)
    if rank != 0:
        return 0
    if launched and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # mpirun has bound this process to a core.
    place, contestants = _place(chosen, on_hosts)
    hosts = place.get("hosts", 0)
    ranks, jobs = chosen.ranks or max(launched, 2 * max(hosts, 1)), chosen.jobs or (1 if chosen.quick else 5)
    names = launching.parse_names(chosen.contestants or (_ON_HOSTS if hosts else ",".join(CONTESTANTS)), contestants)
    if ranks < 2 or jobs < 1 or (hosts and ranks % hosts):
        raise UsageError(f"--ranks {ranks} --jobs {jobs}: needs at least 2 ranks, as many on each host, and 1 job")
    if chosen.format == "osu" and len(names) != 1:
        raise UsageError(f"--format osu prints one contestant, not {len(names)}; name it by --contestants")
    rows, left_out = _rows(chosen, ranks)
    found_machine = machines.machine(None)
    used = {name: contestants[name] for name in names}
    starts, notes = _starts(used, ranks, {name: getattr(chosen, name) for name in PREFIXES})
    if not starts:
        raise NotBuilt(f"--contestants {','.join(names)}: none is installed")
    budget = _QUICK_BUDGET_S if chosen.quick else chosen.budget
    ended, failed, others = _run(used, starts, ranks, rows, budget, jobs, notes)
    found_machine["others"] = others
    measured = combine(ended)
    if not measured:
        reasons = "; ".join(f"{name}: {notes[name]}" for name in names)
        raise SordinoError(f"no contestant has completed a job: {reasons}")
    results: Results = {
        "benchmark": "collectives",
        "name": f"collectives_hosts{hosts}x{ranks // hosts}" if hosts else f"collectives_np{ranks}",
        "machine": found_machine,
        "ranks": ranks,
        **place,
        "jobs": jobs,
        "labels": {name: used[name].label for name in names},
        "baselines": {used[name].label: notes[name] for name in names if name in PEERS or name in failed},
        "left_out": left_out,
        "rows": measured,
        "wrong": wrong(measured),
        "targets": targets_between_hosts(measured) if hosts else targets(measured, ranks),
    }
    if chosen.format == "osu":
        print(tables.osu(results, names[0]), flush=True)
        records.save(results, chosen.results, REPORTS)
        for line in tables.bimodal_lines(results):
            records.log(f"jobs differ by more than 1.5 times: {line}")
    else:
        records.publish(results, command_line.results_folder(chosen), REPORTS)
    for line in results["wrong"]:
        records.log(f"wrong result: {line}")
    return 1 if results["wrong"] or any(name in (*OURS, "alone", "floor") for name in failed) else 0


def _place(chosen: argparse.Namespace, on_hosts: OnHosts | None) -> tuple[Results, Mapping[str, Contestant]]:
    """Return the number of hosts and the Mbps of their links, for the results, and the contestants there."""
    if chosen.hosts is None:
        if chosen.rate is not None:
            raise UsageError("--rate is of the links of hosts; add --hosts N")
        return {}, CONTESTANTS
    if on_hosts is None:
        raise NotBuilt("emulated hosts need a clone of the repository: python benchmarks/collectives.py --hosts 2")
    if chosen.hosts < 2:
        raise UsageError(f"--hosts {chosen.hosts}: needs at least 2 hosts")
    mbps = None if chosen.rate is None else command_line.parse_mbps(chosen.rate)
    return {"hosts": chosen.hosts, "mbps": mbps or 0}, on_hosts(chosen.hosts, mbps)


def _rows(chosen: argparse.Namespace, ranks: int) -> tuple[list[tuple[str, int]], list[str]]:
    """Return the rows to measure, and a text for each row that would take too much memory."""
    operations = [word.strip() for word in chosen.operations.split(",")]
    unknown = [word for word in operations if word not in OPERATIONS]
    if unknown:
        raise UsageError(f"unknown operation {', '.join(unknown)}; use some of {', '.join(OPERATIONS)}")
    usual = _QUICK_SIZES if chosen.quick else SIZES_ON_HOSTS if chosen.hosts else SIZES
    texts = (chosen.sizes or usual).split(",")
    sizes = sorted({command_line.parse_bytes(text) for text in texts})
    limit = _MEMORY * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows, left_out = [], []
    for operation, size in rows_to_measure(operations, sizes, ranks):
        needed = job_bytes(operation, size, ranks)
        if needed <= limit:
            rows.append((operation, size))
        else:
            text = f"{operation} of {format_bytes(size)} needs {needed / (1 << 30):.1f} GiB of buffers"
            left_out.append(text)
            records.log(f"left out: {text}")
    if not rows:
        what = f"--operations {chosen.operations} --sizes {','.join(texts)}"
        reasons = "; ".join(left_out) or "its data cannot be divided among the ranks"
        raise UsageError(f"{what}: nothing is left to measure: {reasons}")
    return rows, left_out


def _starts(
    used: Mapping[str, Contestant], ranks: int, prefixes: Mapping[str, Path]
) -> tuple[dict[str, Start], dict[str, str]]:
    """Return the commands of contestants that are installed, and for each other one the reason why it is not."""
    starts, notes = {}, {}
    for name, contestant in used.items():
        try:
            starts[name] = contestant.start(ranks, prefixes)
        except NotBuilt as error:
            notes[name] = f"not found ({error})"
            records.log(f"{name}: {notes[name]}")
    return starts, notes


def _run(
    used: Mapping[str, Contestant],
    starts: Mapping[str, Start],
    ranks: int,
    rows: launching.Rows,
    budget: float,
    jobs: int,
    notes: dict[str, str],
) -> tuple[dict[str, list[Results]], list[str], float | None]:
    """Run all jobs. Return their results by contestant, contestants that failed, and the cores that others used.

    Adds the version of each contestant, or its failure, to `notes`. A contestant that failed starts no further job.
    """
    ended: dict[str, list[Results]] = {name: [] for name in starts}
    failed: list[str] = []
    loads = []
    for number in range(jobs):
        watch = Watch(Participants())
        time.sleep(1.0 if jobs > 1 else 0.1)
        loads.append(watch.others())
        for name in rotated(starts, number):
            if name in failed:
                continue
            begin = time.monotonic()
            try:
                ended[name].append(launching.run_job(used[name].library, starts[name], ranks, rows, budget))
                notes[name] = ended[name][-1]["version"]
                what = f"{time.monotonic() - begin:.0f} s"
            except SordinoError as error:
                failed.append(name)
                notes[name] = what = f"job {number + 1} failed ({error})"
            records.log(f"job {number + 1} of {jobs}, {name}: {what}")
    known = [load for load in loads if load is not None]
    return ended, failed, round(sum(known) / len(known), 2) if known else None
