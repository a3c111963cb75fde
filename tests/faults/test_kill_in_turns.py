"""A rank is killed in a turn, in which ranks repeat an operation without a negotiation, or in the data phase after it.
All other ranks raise `PeerLost` with its rank, and have had no wrong result before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pace import bound
from turns import TurnJob

from sordino._core import build_info

HEARS_WITHIN_S = 0.25  # on an idle machine
STRIKE = 6
# Rows of two float32: done in one shot; an all-reduce in two turns; and by slots or in place.
SMALL, MEDIUM, LARGE = 2, 40_000, 200_000
KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "barrier")


def case(kind: str, way: str, when: str, rows: int, victim: int, **more: Any) -> Any:
    """Return a case. Each path is a class of drills, of which `make test` runs the first."""
    per_node, arena = more.get("per_node", 0), more.get("arena", False)
    size = {SMALL: "small", MEDIUM: "medium", LARGE: "large"}[rows]
    name = f"{kind}-{way}-{when}-{size}-{victim}" + f"-x{per_node}" * bool(per_node) + "-arena" * arena
    path = more.get("path", f"{kind} in a turn")
    return pytest.param(kind, way, when, rows, victim, per_node, arena, id=name, marks=pytest.mark.drill(path))


def cases() -> list[Any]:
    blocking, asynchronous = "blocking", "asynchronous"
    found = [
        # One node, small.
        case("allreduce", blocking, "entered", SMALL, 1),
        case("allgather", asynchronous, "entered", SMALL, 0),
        case("reducescatter", blocking, "late", SMALL, 2),
        case("alltoall", asynchronous, "late", SMALL, 1),
        case("broadcast", blocking, "entered", SMALL, 2),
        case("barrier", blocking, "late", SMALL, 0),
        # Two turns, by shards and by locations.
        case("allreduce", blocking, "inside", MEDIUM, 1, path="an all-reduce in two turns"),
        case("allreduce", asynchronous, "late", MEDIUM, 2, path="an asynchronous all-reduce in two turns"),
        case("allreduce", blocking, "inside", MEDIUM, 0, arena=True, path="an all-reduce in place in two turns"),
        # Large: the ranks agree in a turn, and move the data after it.
        case("allreduce", asynchronous, "inside", LARGE, 1, path="a large repeat"),
        case("allgather", blocking, "inside", LARGE, 2, path="an all-gather through slots"),
        case("broadcast", asynchronous, "inside", LARGE, 2, path="a broadcast through slots"),
        case("allgather", asynchronous, "inside", LARGE, 0, arena=True, path="an all-gather in place"),
        case("broadcast", blocking, "inside", LARGE, 2, arena=True, path="a broadcast in place"),
        # Two nodes: followers are 1 and 3, leaders 0 and 2.
        case("allreduce", blocking, "entered", SMALL, 1, per_node=2, path="a follower in a turn between nodes"),
        case("allreduce", asynchronous, "entered", SMALL, 2, per_node=2, path="a leader in a turn between nodes"),
    ]
    for kind in KINDS:
        for way in (blocking, asynchronous):
            for when in ("entered", "late"):
                found.append(case(kind, way, when, SMALL, len(found) % 3))
                for victim in (0, 1, 2, 3):
                    found.append(case(kind, way, when, SMALL, victim, per_node=2))
                if kind != "barrier":
                    found.append(case(kind, way, when, LARGE, len(found) % 3, path="a large repeat"))
            if kind != "barrier":
                found.append(case(kind, way, "inside", LARGE, len(found) % 3, path="a large repeat"))
                found.append(case(kind, way, "inside", LARGE, len(found) % 4, per_node=2, path="a large repeat"))
                found.append(case(kind, way, "inside", LARGE, len(found) % 3, arena=True, path="a large repeat"))
    return list({one.id: one for one in reversed(found)}.values())[::-1]


@pytest.mark.parametrize(("kind", "way", "when", "rows", "victim", "per_node", "arena"), cases())
def test_the_others_name_the_rank_that_was_killed_in_a_turn(
    tmp_path: Path,
    note_time: Callable[[str, float], None],
    kind: str,
    way: str,
    when: str,
    rows: int,
    victim: int,
    per_node: int,
    arena: bool,
) -> None:
    if per_node and not build_info()["ucx"]:
        pytest.skip("this build has no UCX")
    plan = {"kinds": [kind], "way": way, "rows": rows, "arena": arena, "victim": victim, "when": when}
    with TurnJob(tmp_path, 4 if per_node else 3, {**plan, "what": "kill", "strikes": [STRIKE]}, per_node) as job:
        struck = job.wait_for(f"fault.{victim}")
        for rank, report in job.reports(without=victim).items():
            assert report["ended"] == "PeerLost", (rank, report, job.output)
            assert report["named"] == [victim] and f"rank {victim}" in report["text"], report
            assert report["wrong"] == 0, report
            # The victim's earlier entry is valid, so the others may have the result of this operation.
            assert report["done"] >= STRIKE, report
            after = report["at"] - struck["at"]
            note_time(f"a kill in a turn, {2 if per_node else 1} nodes, until the others raise", after)
            assert after < bound(HEARS_WITHIN_S), report
