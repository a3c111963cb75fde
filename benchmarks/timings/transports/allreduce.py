"""All-reduce of float32 between hosts: Sordino over MPI and over UCX, MPI_Allreduce, and Gloo.

  python benchmarks/transports.py allreduce           # as root, in a clone

Each job has one contestant. Jobs take turns, in a different order each round. Hosts are emulated, with links of --mbps
each way (0: as fast as the machine). On one machine (--hosts 0,0x8) Sordino is started by `sordino run` and by mpirun,
with tensors in shared and in ordinary memory; the floor is the time to read and write the bytes of an in-place average
without communication. A time is the slowest rank's, from a common barrier to the return of the call. All contestants
compute the average, except MPI_Allreduce, which computes the sum. The limit is the time that 2 (H-1)/H of the bytes,
for H hosts, and their headers take at the link's rate.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from cluster.jobs import Starter, failed, machine_before, run_here, run_on_hosts, wrong_contestants
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, records
from sordino.report.tables import format_bytes, format_seconds
from sordino.timing import summarize
from timings.transports.report import REPORTS, place_of

_WORKER = "timings.transports.allreduce_worker"
_PAYLOAD = 0.956  # share of a link's rate that headers of Ethernet, IP and TCP leave
SIZES = "4,4KiB,16KiB,64KiB,1MiB,2MiB,4MiB,64MiB"
PLACES = "0,2x1,2x2,4x1"
# Contestant of the worker, and its launcher, by name.
BETWEEN_HOSTS: dict[str, tuple[str, Starter]] = {
    "sordino_ucx": ("sordino", "torchrun"),
    "sordino_mpi": ("sordino", "mpirun"),
    "mpi": ("mpi", "mpirun"),
    "gloo": ("gloo", "torchrun"),
}
HERE: dict[str, tuple[str, Starter]] = {
    "sordino_local": ("sordino", "local"),
    "sordino_mpi": ("sordino", "mpirun"),
    "ordinary": ("ordinary", "local"),
    "floor": ("floor", "local"),
    "mpi": ("mpi", "mpirun"),
    "gloo": ("gloo", "torchrun"),
}
_TRANSPORTS = {
    "sordino_ucx": "ucx",
    "sordino_mpi": "mpi",
    "sordino_local": "local",
    "ordinary": "local",
    "floor": "local",
    "mpi": "mpi",
    "gloo": "gloo",
}


def limit(size: int, hosts: int, mbps: float) -> float | None:
    """Return the least seconds of an all-reduce; None on one host, or if `mbps` is 0."""
    if not mbps or hosts < 2:
        return None
    return size * 8 * 2 * (hosts - 1) / hosts / (mbps * 1e6 * _PAYLOAD)


def measure(hosts: int, each: int, mbps: float, words: Sequence[str], rounds: int) -> list[Results]:
    """Return one row per size with the times of all contestants on some hosts; 0 hosts: on this machine."""
    contestants = BETWEEN_HOSTS if hosts else HERE
    found: dict[str, list[Results]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in random.Random(number).sample(sorted(contestants), len(contestants)):
            by, starter = contestants[name]
            arguments = ["--by", by, *words]
            if hosts:
                job = run_on_hosts(hosts, each, mbps or None, _WORKER, arguments, starter)
            else:
                job = run_here(each, _WORKER, arguments, starter)
            if job["transport"].split()[0] != _TRANSPORTS[name]:
                raise SordinoError(f"{name} went by {job['transport']}")
            found[name].append(job)
    rows = []
    for k, first in enumerate(found["gloo"][0]["rows"]):
        entries = {}
        for name, jobs in found.items():
            turns = [np.array(job["rows"][k]["seconds"]) for job in jobs]
            entries[name] = summarize(np.concatenate(turns)) | {
                "turns": [float(np.median(turn)) for turn in turns],
                "p99": float(np.percentile(np.concatenate(turns), 99)),
                "right": all(job["rows"][k]["right"] for job in jobs),
            }
        row = {"hosts": hosts, "ranks_per_host": each, "mbps": mbps, "bytes": first["bytes"], "contestants": entries}
        rows.append(row | {"limit": limit(first["bytes"], hosts, mbps)})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Start the jobs. Status 1 if one failed or has a wrong result, 2 if no cluster can be made."""
    options = command_line.parser("transports allreduce", __doc__, 2.0, "size and turn")
    options.add_argument("--sizes", default=SIZES, metavar="LIST", help=f"default {SIZES}")
    options.add_argument(
        "--hosts",
        default=PLACES,
        metavar="LIST",
        help=f"of HOSTSxRANKS, so many ranks on each; 0xRANKS: one machine, 0: two ranks there (default {PLACES})",
    )
    options.add_argument("--mbps", default="1000,10000", metavar="LIST", help="default 1000,10000")
    options.add_argument("--rounds", type=int, default=3, metavar="N", help="jobs of each contestant (default 3)")
    chosen = options.parse_args(argv)
    sizes = [command_line.parse_bytes(text) for text in chosen.sizes.split(",")]
    budget = 0.2 if chosen.quick else chosen.budget
    words = ["--sizes", ",".join(map(str, sizes)), "--budget", f"{budget:g}"]
    found_machine = machine_before()
    rows: list[Results] = []
    try:
        for text in chosen.hosts.split(","):
            hosts, each = (int(part) for part in text.split("x")) if text != "0" else (0, 2)
            for mbps in (float(rate) for rate in chosen.mbps.split(",")) if hosts else (0.0,):
                for row in measure(hosts, each, mbps, words, 1 if chosen.quick else chosen.rounds):
                    rows.append(row)
                    times = [f"{name} {format_seconds(one['median'])}" for name, one in row["contestants"].items()]
                    records.log(f"{format_bytes(row['bytes'])}, {place_of(row)}: {', '.join(times)}")
    except SordinoError as error:
        return failed("transports", error)
    wrong = wrong_contestants(rows)
    results: Results = {
        "benchmark": "transports_allreduce",
        "name": "transports_allreduce" if any(row["hosts"] for row in rows) else "transports_here",
        "machine": found_machine,
        "rows": rows,
        "wrong": wrong,
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0
