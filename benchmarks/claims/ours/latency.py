"""Time of small all-reduces from Python, against MPI's."""

from __future__ import annotations

from claims.claim import Claim, Found, Plan, Run
from claims.evidence import below
from claims.papers import SORDINO
from cluster.jobs import run_here
from sordino.report import Results
from sordino.report.tables import format_bytes

SIZES, JOBS = (4, 4096, 16_384, 65_536), 5
_BUDGET = 0.5  # seconds per size
_CONTESTANTS = {"sordino": "local", "mpi": "mpirun"}


def job(by: str, starter: str, sizes: list[int], number: int) -> Results:
    """Time all-reduces of two ranks in a job with one contestant. `number` distinguishes jobs with equal settings."""
    words = ["--by", by, "--sizes", ",".join(map(str, sizes)), "--budget", f"{_BUDGET:g}"]
    rows = run_here(2, "timings.transports.allreduce_worker", words, "mpirun" if starter == "mpirun" else "local")[
        "rows"
    ]
    return {"seconds": [sorted(row["seconds"])[len(row["seconds"]) // 2] for row in rows]}


def plan(quick: bool) -> Plan:
    """Run jobs of both contestants in turn."""
    jobs = 2 if quick else JOBS
    keys = [(by, number) for number in range(jobs) for by in _CONTESTANTS]
    settings = [{"by": by, "starter": _CONTESTANTS[by], "sizes": list(SIZES), "number": k} for by, k in keys]
    found = yield [Run("claims.ours.latency:job", one, alone=True) for one in settings]
    seconds = {key: one["seconds"] for key, one in zip(keys, found, strict=True)}
    evidence = []
    for k, size in enumerate(SIZES):
        ratios = [seconds["sordino", number][k] / seconds["mpi", number][k] for number in range(jobs)]
        limit = 1.5 if size == SIZES[0] else 1.0
        evidence.append(below(f"{format_bytes(size)}: ours over MPI_Allreduce, below {limit:g}", ratios, limit))
    return Found([evidence[1], evidence[0], *evidence[2:]])


CLAIM = Claim(
    name="sordino-latency",
    paper=SORDINO,
    place="Small messages",
    says="On a node `hvd.allreduce_` of 4 KiB takes no longer than MPI_Allreduce through mpi4py, and of 4 bytes at "
    "most 1.5 times as long.",
    setting="Ranks negotiate a repeated operation once. After that the calling thread does everything, in slots of "
    "shared memory.",
    here=f"Two ranks, one contestant per job, {JOBS} jobs of each in turn; medians of the slowest rank's times.",
    plan=plan,
    why="From 16 KiB on Sordino takes a third of MPI's time. Below, times of equal jobs differ by a tenth, so they are "
    "not told apart from these limits: 4 bytes take 1.5 times as long, which is the limit.",
)
