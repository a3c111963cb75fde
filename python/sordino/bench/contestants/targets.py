"""Requirements on Sordino's collectives. Ratios are the time of the fastest peer over Sordino's."""

from __future__ import annotations

from collections.abc import Sequence

from sordino.bench.contestants.rows import MPIS, PEERS, ratio_to_best
from sordino.report import Results, verdicts
from sordino.report.tables import format_bytes

_KIB, _MIB, _ANY = 1 << 10, 1 << 20, 1 << 40
# Requirements on all-reduce: contestant, sizes in words, first and last size in bytes, and least ratio.
_ALLREDUCE = (
    ("ordinary", "4 B", 4, 4, 0.8),
    ("ordinary", "above 4 B", 5, _ANY, 1.0),
    ("arena", "from 4 KiB to below 1 MiB", 4 * _KIB, _MIB - 1, 1.0),
    ("arena", "from 1 MiB", _MIB, _ANY, 2.0),
)
_ASYNCHRONOUS_US = {2: 12, 4: 40}  # limit for 4 B in us, by number of ranks


def targets(rows: Sequence[Results], ranks: int) -> list[Results]:
    """Return the requirements on a machine of two cores. Those on all-reduce apply to 2 and 4 ranks."""
    found: list[Results | None] = []
    if ranks in _ASYNCHRONOUS_US:
        for ours, sizes, first, last, limit in _ALLREDUCE:
            found.append(_worst(rows, "allreduce", ours, sizes, (first, last), limit))
        found.append(_asynchronous(rows, _ASYNCHRONOUS_US[ranks]))
    for operation in ("allgather", "reducescatter", "alltoall", "broadcast"):
        found.append(_worst(rows, operation, "ordinary", "64 B to 64 KiB", (64, 64 * _KIB), 0.8, MPIS))
        found.append(_worst(rows, operation, "ordinary", "1 to 64 MiB", (_MIB, 64 * _MIB), 1.0))
    found.append(_worst(rows, "barrier", "ordinary", "", (0, 0), 0.8, MPIS))
    found += distributed_targets(rows)
    return [one for one in found if one is not None]


def distributed_targets(rows: Sequence[Results]) -> list[Results | None]:
    """Return the requirements on the backend of torch.distributed, relative to Gloo, if the backend was measured."""
    if not any("distributed" in row["contestants"] for row in rows):
        return []
    found = []
    for operation in ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "sendrecv"):
        found.append(_worst(rows, operation, "distributed", "64 B to 64 KiB", (64, 64 * _KIB), 20.0, ("gloo",)))
        found.append(_worst(rows, operation, "distributed", "64 MiB", (64 * _MIB, 64 * _MIB), 5.0, ("gloo",)))
    found.append(_worst(rows, "barrier", "distributed", "", (0, 0), 20.0, ("gloo",)))
    return found


def targets_between_hosts(rows: Sequence[Results]) -> list[Results]:
    """Return the requirements on ranks of several hosts: each size of each operation that moves data."""
    found = [
        _worst(rows, row["operation"], "ordinary", format_bytes(row["bytes"]), (row["bytes"],) * 2, 1.0)
        for row in rows
        if row["operation"] != "barrier"
    ]
    return [one for one in (*found, *distributed_targets(rows)) if one is not None]


def _worst(
    rows: Sequence[Results],
    operation: str,
    ours: str,
    sizes: str,
    extent: tuple[int, int],
    limit: float,
    peers: Sequence[str] = PEERS,
) -> Results | None:
    """Return the requirement on the smallest ratio of the rows with sizes in `extent`; None without such rows."""
    among = [row for row in rows if row["operation"] == operation and extent[0] <= row["bytes"] <= extent[1]]
    if not among:
        return None
    ratios = [(*found, row["bytes"]) for row in among if (found := ratio_to_best(row, ours, peers)) is not None]
    peer_name = {MPIS: "best MPI", PEERS: "best peer"}.get(tuple(peers), " or ".join(peers))
    what = f"{f'{operation} {sizes}'.strip()}, {ours}: {peer_name} over Sordino"
    if not ratios:
        return verdicts.target(what, None, limit, at_least=True)
    value, peer, size = min(ratios)
    where = f"{peer} at {format_bytes(size)}" if size else peer
    return verdicts.target(f"{what} (worst: {where})", value, limit, at_least=True)


def _asynchronous(rows: Sequence[Results], limit_us: int) -> Results | None:
    for row in rows:
        if (row["operation"], row["bytes"]) == ("allreduce", 4) and "asynchronous" in row["contestants"]:
            value = limit_us * 1e-6 / row["contestants"]["asynchronous"]["median"]
            return verdicts.target(f"allreduce 4 B, asynchronous: {limit_us} µs over its time", value, 1.0, True)
    return None
