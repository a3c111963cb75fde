"""The required speeds and the measured ones: a row per requirement, from the results of the other benchmarks.

  python benchmarks/speed.py                          # the table; measures simulate, which nothing else does
  python benchmarks/speed.py --keep                   # the table alone, with what simulate took before

Every figure comes from the JSON files beside the table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.jobs import machine_before
from sordino.bench import command_line
from sordino.errors import UsageError
from sordino.report import Results, machines, records, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_seconds, table

KIB, MIB = 1024, 1024 * 1024
GRADIENTS = 102_228_128  # bytes of ResNet-50's

Files = Callable[[str], Results]
Found = tuple[float, str] | None
"""A figure and what it is made of, in words; None: nothing was measured."""


@dataclass(frozen=True)
class Row:
    """One requirement.

    Attributes:
        what: is compared.
        limit: of the figure; `at_least` says on which side it is to be.
        now: the figure of today.
        why: it is missed, if it is.
    """

    what: str
    limit: float
    now: Callable[[Files], Found]
    at_least: bool = False
    why: str = ""


def _row(rows: Sequence[Results], **which: Any) -> Results:
    for row in rows:
        if all(row.get(key) == value for key, value in which.items()):
            return row
    raise LookupError(f"no row of {which}")


def _reduced(files: Files, hosts: int, ranks: int, mbps: float, size: int) -> dict[str, Results]:
    name = "transports_allreduce" if hosts else "transports_here"
    found: dict[str, Results] = _row(files(name)["rows"], hosts=hosts, ranks_per_host=ranks, mbps=mbps, bytes=size)[
        "contestants"
    ]
    return found


def here(over: str, under: str, size: int, ranks: int = 2) -> Callable[[Files], Found]:
    """One contestant's time over another's, on one machine."""

    def find(files: Files) -> Found:
        found = _reduced(files, 0, ranks, 0.0, size)
        one, other = found[over]["median"], found[under]["median"]
        return one / other, f"{format_seconds(one)} / {format_seconds(other)}"

    return find


def slow_ones(size: int) -> Callable[[Files], Found]:
    """The slowest of a hundred calls over the median."""

    def find(files: Files) -> Found:
        one = _reduced(files, 0, 2, 0.0, size)["sordino_local"]
        return one["p99"] / one["median"], f"{format_seconds(one['p99'])} / {format_seconds(one['median'])}"

    return find


def seconds_between(hosts: int, ranks: int, mbps: float, size: int) -> Callable[[Files], Found]:
    """Our slower transport's time, in ms."""

    def find(files: Files) -> Found:
        found = _reduced(files, hosts, ranks, mbps, size)
        ours = max(found[name]["median"] for name in ("sordino_ucx", "sordino_mpi"))
        words = ", ".join(f"{name} {format_seconds(one['median'])}" for name, one in found.items())
        return 1e3 * ours, words

    return find


def over_peers(hosts: int, ranks: int, mbps: float, size: int) -> Callable[[Files], Found]:
    """Our better transport's time over the better peer's."""

    def find(files: Files) -> Found:
        found = _reduced(files, hosts, ranks, mbps, size)
        ours = min(found[name]["median"] for name in ("sordino_ucx", "sordino_mpi"))
        peers = min(found[name]["median"] for name in ("mpi", "gloo"))
        return ours / peers, f"{format_seconds(ours)} / {format_seconds(peers)}"

    return find


def target(file: str, what: str, inverse: bool = False) -> Callable[[Files], Found]:
    """What a benchmark has found of a target of its own; those that begin so are judged by the worst."""

    def find(files: Files) -> Found:
        values = [one["value"] for one in files(file)["targets"] if one["what"].startswith(what)]
        values = [1 / value if inverse else value for value in values if value is not None]
        return (max(values), f"{file}: {what}") if values else None

    return find


def exposed(key: str, other: str) -> Callable[[Files], Found]:
    """What a peer adds to a step over what we add."""

    def find(files: Files) -> Found:
        found = files("fusion")["modes"][key]["contestants"]
        ours, theirs = (found[name]["exposed"]["median"] for name in ("sordino", other))
        return theirs / ours, f"{format_seconds(theirs)} / {format_seconds(ours)}"

    return find


def exposed_over_arena(files: Files) -> Found:
    """What a step adds, gradients kept, over averaging as many bytes."""
    ours = files("fusion")["modes"]["False"]["contestants"]["sordino"]["exposed"]["median"]
    alone = _reduced(files, 0, 2, 0.0, GRADIENTS)["sordino_local"]["median"]
    return ours / alone, f"{format_seconds(ours)} / {format_seconds(alone)}"


def fresh_over_kept(files: Files) -> Found:
    """What a step adds with fresh gradients over what one adds whose gradients are kept."""
    modes = files("fusion")["modes"]
    fresh, kept = (modes[key]["contestants"]["sordino"]["exposed"]["median"] for key in ("True", "False"))
    return fresh / kept, f"{format_seconds(fresh)} / {format_seconds(kept)}"


def wrapper(file: str, key: str) -> Callable[[Files], Found]:
    """What the wrapper adds to a step, in percent of it."""

    def find(files: Files) -> Found:
        found = files(file)["modes"][key]["contestants"]
        added, step = found["sordino"]["exposed"]["median"], found["plain"]["step"]["median"]
        return 100 * added / step, f"{format_seconds(added)} of {format_seconds(step)}"

    return find


def per_byte(files: Files) -> Found:
    """Eight ranks over two, 64 MiB each: the memory that is read and written grows with the ranks."""
    eight, two = (_reduced(files, 0, ranks, 0.0, 64 * MIB)["sordino_local"]["median"] for ranks in (8, 2))
    return eight / 4 / two, f"{format_seconds(eight)} / 4 / {format_seconds(two)}"


def simulated(key: str) -> Callable[[Files], Found]:
    """Seconds or MiB of 10^5 workers in simulate."""
    return lambda files: (files("speed")["simulate"][key], files("speed")["simulate"]["command"])


def small(size: int, limit: float, why: str = "") -> Row:
    """A row of a small message on one machine."""
    name = f"{size} B" if size < KIB else f"{size // KIB} KiB"
    return Row(f"one machine, {name}: over MPI_Allreduce", limit, here("sordino_local", "mpi", size), why=why)


FRESH, KEPT = "True", "False"

# Why a row is missed, if it is.
CALL = (
    "half of it is the call: of a function of the core that does nothing, the floor's row at 4 B; looking at "
    "the tensor (dtype, shape, address) takes 0.3 us more, where mpi4py gets a buffer that was looked at "
    "before"
)
SLOTS = (
    "what lies in private memory goes through slots: copied in, folded, written twice, copied out, 4 bytes "
    "touched for each of the tensor's, at the 30 GB/s of a core beside another one. MPI has the kernel copy, "
    "which comes to the same"
)
EIGHT = "so does the floor, which talks to nobody: eight tensors do not fit where two did"
FRESH_ONES = (
    "fresh gradients go through slots: 102 MB in ordinary memory take about twice as long as in the arena "
    "(transports_here). Moved to an arena by the MiB while backward goes on they took longer still (docs/design.md)"
)
BESIDE = (
    "most of it runs under backward on the same two cores, and takes from it what it uses itself; the last "
    "bucket, of 9 MB, has nothing left to hide under"
)
NARROW = "that is the reduction, whose two waits cost more than its 400 KB; at one rank the wrapper adds nothing"
FOUR = "four ranks on two cores: who is waited for has to be given a core first"
SHARDS = (
    "two exchanges move 3 bytes for each of the model's, an all-reduce 2, and ranks meet twice; overlap=True "
    "hides the second one (local_sgd.py overlap)"
)
LAYERED = (
    "a host's members and its communicator meet twice more, and spinning hosts share two cores; between runs "
    "the ratio moves by more than what is missing"
)

ROWS = [
    small(4, 1.5, CALL),
    small(4 * KIB, 1.0),
    small(16 * KIB, 1.0),
    small(64 * KIB, 1.0),
    *[
        Row(f"the same, {s}: slowest of 100 over median", 5.0, slow_ones(b))
        for s, b in (("4 B", 4), ("4 KiB", 4 * KIB), ("64 KiB", 64 * KIB))
    ],
    *[
        Row(
            f"ordinary memory, {s}: MPI_Allreduce over ours",
            1.3,
            here("mpi", "ordinary", b),
            at_least=True,
            why=SLOTS,
        )
        for s, b in (("64 KiB", 64 * KIB), ("256 KiB", 256 * KIB), ("1 MiB", MIB), ("4 MiB", 4 * MIB))
    ],
    Row("arena, 64 MiB: MPI_Allreduce over ours", 4.0, here("mpi", "sordino_local", 64 * MIB), at_least=True),
    Row("arena, 64 MiB: over the floor", 1.1, here("sordino_local", "floor", 64 * MIB)),
    Row("8 ranks on 2 cores, 64 MiB: time a byte over that of 2 ranks", 1.0, per_byte, why=EIGHT),
    *[
        Row(
            f"ResNet-50's step, gradients {how}: {label} adds over what we add",
            8.0,
            exposed(key, peer),
            at_least=True,
            why=FRESH_ONES if key == FRESH else BESIDE,
        )
        for how, key, peer, label in (
            ("kept", KEPT, "gloo", "DDP-gloo"),
            ("kept", KEPT, "horovod", "Horovod"),
            ("fresh", FRESH, "gloo", "DDP-gloo"),
            ("fresh", FRESH, "horovod", "Horovod"),
        )
    ],
    Row("ResNet-50's step, kept: added over averaging 102 MB", 1.3, exposed_over_arena, why=BESIDE),
    Row("ResNet-50's step: fresh over kept, added", 1.2, fresh_over_kept, why=FRESH_ONES),
    *[
        Row(
            f"161 small tensors, one rank, gradients {how}: the wrapper, % of a step",
            1.0,
            wrapper("fusion_one_rank_narrow", key),
        )
        for how, key in (("fresh", FRESH), ("kept", KEPT))
    ],
    *[
        Row(
            f"161 small tensors, two ranks, gradients {how}: added, % of a step",
            1.0,
            wrapper("fusion_alone_narrow", key),
            why=NARROW,
        )
        for how, key in (("fresh", FRESH), ("kept", KEPT))
    ],
    *[
        Row(f"64 MiB, 1 Gbps, {h} hosts x {r}: ms", limit, seconds_between(h, r, 1000.0, 64 * MIB))
        for h, r, limit in ((2, 2, 600.0), (2, 1, 600.0), (4, 1, 900.0))
    ],
    *[
        Row(
            f"64 MiB, 1 Gbps, {h} hosts x {r}: over the better of MPI and Gloo",
            1.0,
            over_peers(h, r, 1000.0, 64 * MIB),
        )
        for h, r in ((2, 2), (2, 1), (4, 1))
    ],
    *[
        Row(
            f"10 Gbps, 2 hosts x 2, {s}: over the better of MPI and Gloo",
            1.0,
            over_peers(2, 2, 10000.0, b),
            why=FOUR,
        )
        for s, b in (("64 KiB", 64 * KIB), ("2 MiB", 2 * MIB), ("64 MiB", 64 * MIB))
    ],
    Row("10 Gbps, 2 hosts x 2, 64 MiB: ms", 150.0, seconds_between(2, 2, 10000.0, 64 * MIB)),
    Row(
        "4 ranks on 2 cores: Crossover over our all-reduce",
        1.15,
        target("gossip_exchange_np4", "Crossover by model: not slower than our", inverse=True),
    ),
    Row(
        "sharded over whole-model local SGD, one machine (EDSR, 2 groups of 2)",
        1.1,
        target("local_sgd_communication", "edsr, here, P=2, K=2: all communication, shards over whole models"),
        why=SHARDS,
    ),
    *[
        Row(
            f"Layered, 4 shaped hosts, {by}, nothing to load: over all-reduce",
            1.05,
            target("layered", f"resnet50, 4 workers on 4 hosts, {by}: nothing to load, over AllReduce"),
            why=LAYERED,
        )
        for by in ("thread", "rank")
    ],
    Row(
        "scale of 8-bit and 16-bit integers over a copy",
        1.15,
        target("kernels", "scale, integers and bool, 64 MiB"),
    ),
    Row("simulate, scheduled pull, 10^5 workers: seconds", 60.0, simulated("seconds")),
    Row("simulate, scheduled pull, 10^5 workers: MiB", 1024.0, simulated("mib")),
]


def simulate() -> Results:
    """Run 10^5 workers of scheduled pull; what that takes."""
    words = [
        "--algorithm",
        "scheduled-pull",
        "--data",
        "none",
        "--workers",
        "100000",
        "--steps",
        "32",
        "--set",
        "schedule=autonomous",
    ]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [Path(sys.executable).with_name("sordino"), "simulate", *words], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise UsageError(f"sordino simulate ended with {os.waitstatus_to_exitcode(status)}")
    return {
        "command": f"sordino simulate {' '.join(words)}",
        "seconds": time.perf_counter() - begin,
        "mib": used.ru_maxrss / 1024,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the table. Status 1 if a result that it needs is not there."""
    options = command_line.parser("speed", __doc__)
    options.add_argument("--keep", action="store_true", help="do not run simulate again")
    chosen = options.parse_args(argv)
    folder = chosen.results or Path("benchmarks/results")
    known: dict[str, Results] = {}

    def file(name: str) -> Results:
        if name not in known:
            known[name] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        return known[name]

    if not (chosen.keep or chosen.quick):
        known["speed"] = {"simulate": simulate()}
    rows, missing = [], []
    for row in ROWS:
        try:
            found = row.now(file)
        except (OSError, LookupError) as error:
            found = None
            missing.append(f"{row.what}: {error}")
        judged = verdicts.target(row.what, found[0] if found else None, row.limit, row.at_least)
        rows.append({"key": key_of(row.what)} | judged | {"of": found[1] if found else "", "why": row.why})
    sources = {
        name: {key: one["machine"].get(key) for key in ("date", "cpu", "cores", "others")}
        for name, one in known.items()
        if "machine" in one
    }
    results: Results = {
        "benchmark": "speed",
        "name": "speed",
        "machine": machine_before(),
        "simulate": file("speed")["simulate"],
        "sources": sources,
        "rows": rows,
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    for line in missing:
        records.log(f"not measured: {line}")
    return 1 if missing else 0


def key_of(what: str) -> str:
    """Return a name without spaces or signs, by which pages cite a row."""
    return re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")


def _markdown(results: Results) -> str:
    what = "Each figure is from the result that another benchmark has written."
    words = {True: "met", False: "**missed**", None: "not measured"}
    lines = []
    for row in results["rows"]:
        value = "–" if row["value"] is None else f"{row['value']:.3g}"
        sign = "≥" if row["at_least"] else "≤"
        lines.append([row["what"], value, f"{sign} {row['limit']:g}", words[row["met"]], row["of"]])
    sources = [
        f"- {name}: {one['cpu']}, {one['cores']} cores, {one['date'][:10]}{machines.describe_others(one['others'])}"
        + ("; **another machine than the table's**" if one["cpu"] != results["machine"]["cpu"] else "")
        for name, one in results["sources"].items()
    ]
    reasons = [f"- {row['what']}: {row['why']}" for row in results["rows"] if row["met"] is False and row["why"]]
    blocks = verdicts.opening(results, "Speed: required and measured", what)
    blocks.append(table(["", "Measured", "Required", "Verdict", "Of"], lines))
    blocks += ["## Why some are missed", "\n".join(reasons)] if reasons else []
    return "\n\n".join([*blocks, "## Where each result was measured", "\n".join(sources)])


def _draw(results: Results, figure: Any) -> None:
    """How far each requirement is from its limit."""
    axes = figure.subplots()
    rows = [row for row in results["rows"] if row["value"]]
    far = [row["limit"] / row["value"] if row["at_least"] else row["value"] / row["limit"] for row in rows]
    colours = ["#0b6e4f" if row["met"] else "#c8553d" for row in rows]
    axes.barh([row["what"] for row in rows], far, color=colours)
    axes.axvline(1.0, color="k", lw=0.8)
    axes.invert_yaxis()
    axes.set_xlim(0, 4)
    axes.set_xlabel("of what is required; to the left of 1 is better")
    axes.tick_params(axis="y", labelsize=4)


REPORTS = {"speed": Report(_markdown, _draw)}
