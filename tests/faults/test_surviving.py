"""Ranks that continue to train when others are killed, stopped, raise or leave: real processes, by `sordino run` or
mpirun."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import pytest
from launched import Launched, eventually
from pace import HANG_S, bound, stretched

WORKER = Path(__file__).with_name("surviving_worker.py")
# On an idle machine; the measured times are printed.
ENDS_WITHIN_S = 0.5  # the job, after its last rank's report
ENDS_ANYWAY_S = 2  # in addition, if mpirun stays
GOES_ON_WITHIN_S = 0.25  # after a death that is certain
SILENCE_S = 2

Note = Callable[[str, float], None]


pytestmark = pytest.mark.usefixtures("starter")


class Job(Launched):
    """A job of `surviving_worker.py`, and the files of its ranks."""

    def __init__(self, folder: Path, ranks: int, plan: dict[str, Any], variables: dict[str, str]) -> None:
        self.folder, self.ranks = folder, ranks
        words = ["--on-peer-lost", "continue", "-np", str(ranks)]
        self.silence_s = stretched(SILENCE_S)  # a busy machine must not count as silent
        for name, value in {"SORDINO_SILENCE_S": str(self.silence_s), "SORDINO_TIMEOUT_S": "60", **variables}.items():
            words += ["-x", f"{name}={value}"]
        super().__init__(folder, [*words, "--", *forked.python(), str(WORKER), str(folder), json.dumps(plan)])

    def read(self, name: str) -> Any:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def wait_for_files(self, *names: str) -> None:
        self.wait_for(lambda: all((self.folder / name).exists() for name in names))

    def finish(self, status: int = 0) -> list[dict[str, Any] | None]:
        """Wait for the end; return the reports of all ranks, None for a rank without a report."""
        ended = self.ends()
        found = time.time()
        assert ended == status, f"status {ended}\n{self.output}"
        reports = [self.read(f"report.{rank}") for rank in range(self.ranks)]
        after = found - max((report["at"] for report in reports if report), default=found)
        assert after < bound(ENDS_WITHIN_S, ENDS_ANYWAY_S), f"ended {after:.1f} s after its last rank"
        self.leaves_nothing()
        return reports

    def pid(self, rank: int) -> int:
        return int(self.read(f"pid.{rank}")["pid"])


@contextmanager
def job(folder: Path, ranks: int, plan: dict[str, Any], **variables: str) -> Iterator[Job]:
    with Job(folder, ranks, plan, variables) as one:
        yield one


def check_survivors(reports: list[dict[str, Any] | None], lost: set[int], equal: bool) -> list[dict[str, Any]]:
    """Check that the remaining ranks reached the end together, with the right members and values."""
    survivors = [rank for rank in range(len(reports)) if rank not in lost]
    found = {rank: reports[rank] for rank in survivors}
    assert all(report is not None for report in found.values()), f"{found}"
    left = [report for report in found.values() if report is not None]
    for place, report in enumerate(left):
        assert report["ended"] == "well", report
        assert report["members"] == survivors and report["rank"] == place, report
        assert report["finite"] and report["size"] == len(survivors), report
        assert report["loss"] < report["first_loss"], report
    if equal:
        assert len({report["sha256"] for report in left}) == 1, "survivors' models differ"
    return left


def tell_times(
    job: Job, reports: list[dict[str, Any]], lost: set[int], note: Note, name: str, certain_s: float = 0
) -> None:
    """Note and check the time from each loss until the remaining ranks had met again, beyond the `certain_s` seconds
    that must pass."""
    limit = bound(GOES_ON_WITHIN_S, certain_s)
    for victim in lost:
        fault = job.read(f"fault.{victim}")
        if fault is None:
            continue
        for report in reports:
            after = [resize["at"] - fault["at"] for resize in report["resized"] if resize["at"] > fault["at"]]
            assert after, f"nobody noticed that rank {victim} was lost"
            note(name, min(after))
            assert min(after) < limit, f"it took {min(after):.2f} s to go on without rank {victim}"


def kill(victim: int, step: int, when: str, **more: Any) -> dict[str, Any]:
    return {"victim": victim, "step": step, "when": when, "what": "kill", **more}


# In one job ranks are lost one after the other.
KILLS = [
    ("allreduce", 5, 0, [kill(1, 5, "backward"), kill(0, 9, "between"), kill(3, 13, "exchange")], 512),
    ("allreduce", 3, 1, [kill(1, 8, "exchange")], 1024),
    ("allreduce", 4, 2, [kill(0, 8, "exchange"), kill(3, 8, "exchange")], 512),
    ("allreduce", 4, 0, [kill(1, 8, "between"), kill(2, 8, "exchange", after_s=0.0005)], 64),
    ("crossover", 5, 2, [kill(2, 6, "exchange"), kill(0, 12, "exchange")], 512),
    ("push-sum", 3, 1, [kill(1, 8, "between")], 64),
    ("elastic-averaging", 3, 0, [kill(1, 8, "exchange")], 512),
    ("local-sgd", 4, 2, [kill(0, 7, "exchange")], 512),
    ("caps", 3, 0, [kill(1, 8, "exchange")], 512),
    ("scheduled-pull", 3, 0, [kill(0, 8, "between")], 64),
    ("adpsgd", 3, 1, [kill(0, 8, "between")], 64),
]


# The actions of the others differ: they complete or repeat a step, undo an exchange, or do nothing.
KINDS = {"allreduce": "a step", "scheduled-pull": "nothing", "adpsgd": "nothing"}
CASES = [
    pytest.param(
        *case,
        id=f"{case[0]}-{case[1]}-{case[2]}-" + "-".join(f"{fault['victim']}{fault['when']}" for fault in case[3]),
        marks=pytest.mark.drill(f"killed: {KINDS.get(case[0], 'an exchange')}"),
    )
    for case in KILLS
]


@pytest.mark.parametrize(("algorithm", "ranks", "per_node", "faults", "width"), CASES)
def test_those_that_are_left_train_on(
    tmp_path: Path, note_time: Note, algorithm: str, ranks: int, per_node: int, faults: list[Any], width: int
) -> None:
    lost = {fault["victim"] for fault in faults}
    plan = {"algorithm": algorithm, "faults": faults, "width": width}
    with job(tmp_path, ranks, plan, SORDINO_RANKS_PER_NODE=str(per_node)) as running:
        reports = running.finish()
        left = check_survivors(reports, lost, equal=algorithm == "allreduce")
        if algorithm in ("scheduled-pull", "adpsgd"):  # they miss no rank before an operation of all
            return
        tell_times(running, left, lost, note_time, "kill -9")
        said = re.findall(r"ranks continue without ranks? ([\d, ]+) \(numbered as at the start\)", running.output)
        assert {int(rank) for ranks_ in said for rank in ranks_.split(", ")} == lost, running.output
        if len({len(report["resized"]) for report in left}) == 1:
            for meeting in zip(*(report["resized"] for report in left)):
                assert len({one["sha256"] for one in meeting}) == 1 or algorithm == "allreduce", "models differ after"


@pytest.mark.drill("killed during recovery")
def test_a_rank_killed_while_another_is_missed(tmp_path: Path, note_time: Note) -> None:
    """The second rank is killed as soon as it hears of the first loss."""
    faults = [kill(1, 8, "between"), kill(3, 8, "exchange", after_s=0.012)]
    with job(tmp_path, 5, {"faults": faults, "width": 256}) as running:
        left = check_survivors(running.finish(), {1, 3}, equal=True)
        tell_times(running, left, {1, 3}, note_time, "kill -9 during recovery")


@pytest.mark.drill("attrition")
def test_attrition_to_the_last_one(tmp_path: Path, note_time: Note) -> None:
    faults = [kill(victim, 4 + 2 * turn, "between") for turn, victim in enumerate((3, 0, 7, 1, 6, 2, 5))]
    with job(tmp_path, 8, {"faults": faults, "steps": 20}) as running:
        [last] = check_survivors(running.finish(), {0, 1, 2, 3, 5, 6, 7}, equal=True)
        assert sorted(set(last["sizes"]), reverse=True) == [8, 7, 6, 5, 4, 3, 2, 1]
        tell_times(running, [last], {3, 0, 7, 1, 6, 2, 5}, note_time, "kill -9, 8 to 1")


@pytest.mark.drill("a rank that raises or exits")
def test_ranks_that_end_by_themselves(tmp_path: Path, note_time: Note) -> None:
    ways = {1: "raise", 2: "exit", 4: "_exit"}
    faults = [
        {"victim": victim, "step": 4 + 3 * turn, "when": "between", "what": what}
        for turn, (victim, what) in enumerate(ways.items())
    ]
    with job(tmp_path, 5, {"faults": faults}) as running:
        left = check_survivors(running.finish(), set(ways), equal=True)
        for victim, what in ways.items():
            tell_times(running, left, {victim}, note_time, f"a rank's {what}")
        assert "ValueError: boom of the victim" in running.output


@pytest.mark.drill("stopped")
@pytest.mark.parametrize("algorithm", ["allreduce", "crossover"])
def test_a_stopped_rank_is_left_out_and_learns_it(tmp_path: Path, note_time: Note, algorithm: str) -> None:
    faults = [{"victim": 1, "step": 8, "when": "between", "what": "stop"}]
    plan = {"algorithm": algorithm, "faults": faults, "wait_for": "woken"}
    with job(tmp_path, 3, plan) as running:
        running.wait_for_files("resized.0", "resized.2")
        running.send(running.pid(1), signal.SIGCONT)
        running.wait_for_files("report.1")
        woken = running.read("report.1")
        assert woken["ended"] == "Evicted" and "continued without" in woken["text"], woken
        (tmp_path / "woken").touch()
        reports = running.finish(status=3)  # the evicted rank's own
        reports[1] = None
        left = check_survivors(reports, {1}, equal=algorithm == "allreduce")
        silence_s = running.silence_s
        tell_times(running, left, {1}, note_time, f"SIGSTOP, {silence_s:g} s of silence", silence_s)


@pytest.mark.drill("stopped")
def test_a_stopped_rank_that_does_not_wake_up_does_not_hold_the_job(tmp_path: Path) -> None:
    faults = [{"victim": 1, "step": 8, "when": "between", "what": "stop"}]
    with job(tmp_path, 3, {"faults": faults}) as running:
        assert running.ends() == 0, running.output
        check_survivors([running.read("report.0"), None, running.read("report.2")], {1}, equal=True)
        assert "rank 1 did not end, although the others had continued without it; the others finished" in running.output
        running.leaves_nothing()


@pytest.mark.drill("asleep")
def test_a_rank_that_does_not_come_is_left_out_after_the_deadline(tmp_path: Path, note_time: Note) -> None:
    """Its process lives and reports so, but it does not come to the step."""
    faults = [{"victim": 2, "step": 8, "when": "between", "what": "wait", "for": "left out"}]
    deadline_s = stretched(3)
    variables = {"SORDINO_TIMEOUT_S": str(deadline_s), "SORDINO_STALL_WARN_S": str(deadline_s / 3)}
    with job(tmp_path, 3, {"faults": faults, "wait_for": "woken"}, **variables) as running:
        running.wait_for_files("resized.0", "resized.1")
        (tmp_path / "left out").touch()
        running.wait_for_files("report.2")
        assert running.read("report.2")["ended"] == "Evicted"
        (tmp_path / "woken").touch()
        reports = running.finish(status=3)
        reports[2] = None
        left = check_survivors(reports, {2}, equal=True)
        tell_times(running, left, {2}, note_time, f"asleep, deadline of {deadline_s:g} s", deadline_s)
        assert "sordino: stalled: " in running.output and "for ranks 2" in running.output


@pytest.mark.drill("busy elsewhere")
def test_ranks_that_are_busy_elsewhere_stay(tmp_path: Path) -> None:
    """Ranks may be busy longer than the silence that would make them lost: without communicating, and with the GIL
    held."""
    silence_s = stretched(SILENCE_S)
    faults = [
        {"victim": victim, "step": 6 + 3 * victim, "when": "between", "what": what, "seconds": silence_s + 1}
        for victim, what in enumerate(("sleep", "hold"))
    ]
    with job(tmp_path, 3, {"faults": faults}, SORDINO_SILENCE_S=str(silence_s)) as running:
        left = check_survivors(running.finish(), set(), equal=True)
        for report in left:
            assert not report["resized"] and sum(seconds > silence_s for seconds in report["seconds"]) >= 2, report


@pytest.mark.drill("no quorum")
def test_all_killed_but_one_that_stops(tmp_path: Path) -> None:
    """One of two ranks is stopped for good. The other one cannot know that it is alone."""
    faults = [{"victim": 1, "step": 8, "when": "between", "what": "stop"}]
    with job(tmp_path, 2, {"faults": faults}) as running:
        running.wait_for_files("report.0")
        alone = running.read("report.0")
        assert alone["ended"] == "NoQuorum" and "rank 1" in alone["text"], alone
        assert alone["finite"]
        assert eventually(lambda: not Path(f"/proc/{running.pid(0)}").exists(), HANG_S)
        os.kill(running.pid(1), signal.SIGKILL)
        reports = running.finish(status=3)
        assert reports[1] is None
