"""Ranks are killed (SIGKILL) in real jobs: in a step, in a recovery, and before all ranks have met. Ranks without a
model are killed as well.

If the job survives losses, the remaining ranks continue to train, with the right members and values. Otherwise it ends
soon, with the status of the kill. No process and no file remains.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import forked
import pytest
from launched import Launched
from pace import bound
from surviving import CONTINUE, PLAN_OF_HOSTS, Job, Note, check_survivors, hosts, kill, tell_times

HELPER = Path(__file__).parents[1] / "mp" / "helper_worker.py"
MEETING = str(Path(__file__).with_name("meeting_worker.py"))
ENDS_WITHIN_S = 0.25  # after a helper, on an idle machine


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
# What the remaining ranks do: complete or repeat a step, undo an exchange, or nothing.
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
    starter: str,
    tmp_path: Path,
    note_time: Note,
    algorithm: str,
    ranks: int,
    per_node: int,
    faults: list[Any],
    width: int,
) -> None:
    lost = {fault["victim"] for fault in faults}
    plan = {"algorithm": algorithm, "faults": faults, "width": width}
    with Job(tmp_path, ranks, plan, SORDINO_RANKS_PER_NODE=str(per_node)) as running:
        reports = running.finish()
        left = check_survivors(reports, lost, equal=algorithm == "allreduce")
        if algorithm in ("scheduled-pull", "adpsgd"):  # these notice a loss only in an operation of all ranks
            return
        tell_times(running, left, lost, note_time, "kill -9")
        said = re.findall(r"ranks continue without ranks? ([\d, ]+) \(numbered as at the start\)", running.output)
        assert {int(rank) for ranks_ in said for rank in ranks_.split(", ")} == lost, running.output
        if len({len(report["resized"]) for report in left}) == 1:
            for meeting in zip(*(report["resized"] for report in left)):
                assert len({one["sha256"] for one in meeting}) == 1 or algorithm == "allreduce", "models differ after"


@pytest.mark.drill("killed during recovery")
def test_a_rank_killed_while_another_is_missed(starter: str, tmp_path: Path, note_time: Note) -> None:
    """The second rank is killed as soon as it notices the first loss."""
    faults = [kill(1, 8, "between"), kill(3, 8, "exchange", after_s=0.012)]
    with Job(tmp_path, 5, {"faults": faults, "width": 256}) as running:
        left = check_survivors(running.finish(), {1, 3}, equal=True)
        tell_times(running, left, {1, 3}, note_time, "kill -9 during recovery")


@pytest.mark.drill("attrition")
def test_attrition_to_the_last_one(starter: str, tmp_path: Path, note_time: Note) -> None:
    faults = [kill(victim, 4 + 2 * turn, "between") for turn, victim in enumerate((3, 0, 7, 1, 6, 2, 5))]
    with Job(tmp_path, 8, {"faults": faults, "steps": 20}) as running:
        [last] = check_survivors(running.finish(), {0, 1, 2, 3, 5, 6, 7}, equal=True)
        assert sorted(set(last["sizes"]), reverse=True) == [8, 7, 6, 5, 4, 3, 2, 1]
        tell_times(running, [last], {3, 0, 7, 1, 6, 2, 5}, note_time, "kill -9, 8 to 1")


@pytest.mark.drill("killed on another host")
def test_three_go_on_when_one_is_killed(way: str, tmp_path: Path, note_time: Note) -> None:
    """No other machine sees the process end: UCX or MPI reports that it cannot be reached, or the silence shows it."""
    plan = {**PLAN_OF_HOSTS, "faults": [kill(1, 8, "backward")]}
    with hosts(tmp_path, plan, way) as running:
        for resize in running.resizes(lost=1):
            note_time(f"kill -9 on another host, by {way}", resize["at"] - running.read("fault.1")["at"])
        running.finish_without(1)


@pytest.mark.drill("a helper killed")
@pytest.mark.parametrize(("what", "helpers"), [("communicator", "groups of 2"), ("server", "1 servers")])
def test_the_job_ends_with_it(starter: str, tmp_path: Path, note_time: Note, what: str, helpers: str) -> None:
    """The workers cannot continue without the helper, so the job fails with the status of the kill."""
    program = [*forked.python(), str(HELPER), str(tmp_path), helpers, "kill helper", "none"]
    with Launched(tmp_path, ["-np", "3", "--", *program]) as job:
        job.wait_for(lambda: all((tmp_path / f"trained.{rank}").exists() for rank in range(2)))
        struck = time.monotonic()
        job.send(job.rank(2), signal.SIGKILL)
        # mpirun returns the status of the first end that it sees, and the workers raise within milliseconds.
        assert job.ends() in {128 + signal.SIGKILL, *([1] if starter == "mpi" else [])}
        took = time.monotonic() - struck
        note_time(f"kill -9 of a {what}, until the job has ended", took)
        assert took < bound(ENDS_WITHIN_S), f"{took:.2f} s"
        job.leaves_nothing()


@pytest.mark.drill("killed before all have met")
def test_a_rank_killed_before_it_meets_the_others_ends_this_start(starter_anywhere: str, tmp_path: Path) -> None:
    program = [*forked.python(), MEETING, "os.kill(os.getpid(), 9)"]
    with Launched(tmp_path, ["-np", "2", *CONTINUE, "--restarts", "1", "--", *program]) as job:
        assert job.ends() == 0, job.output
        job.leaves_nothing()
        # The meeting place informs ranks that `sordino run` started itself. Ranks that wait in MPI are not informed.
        told = "sordino.errors.PeerLost: rank 1 ended before all ranks had met"
        if starter_anywhere != "local":
            killed = "rank 1 was ended by signal 9 (SIGKILL) before all ranks had met"
            told = f"{killed}, and the others cannot start without it"
        assert told in job.output
        assert "with status 137, which is signal 9 (SIGKILL); restart 1 of 1" in job.output
        assert job.output.count("met [0, 1]") == 2
        assert "\x1e" not in job.output


# Ranks end in the order of their turns, however long each takes to start. A rank waits until its predecessors are gone,
# which is when their supervisors have seen it, and a moment longer for the supervisors to report it.
ENDS = """
import json, os, pathlib, sys, time
hows, folder = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
rank = int(os.environ.get("SORDINO_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
code, turn = hows[rank]
(folder / f"new.{rank}").write_text(str(os.getpid()))
(folder / f"new.{rank}").rename(folder / f"pid.{rank}")
for other, (_, before) in enumerate(hows):
    while not (folder / f"pid.{other}").exists():
        time.sleep(0.01)
    while before < turn and os.path.exists("/proc/" + (folder / f"pid.{other}").read_text()):
        time.sleep(0.01)
time.sleep(0.3 if turn else 0)
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ([(0, 0), (0, 1), (0, 0)], 0, ""),
        ([(0, 1), (-9, 0), (0, 1)], 0, "rank 1 was ended by signal 9 (SIGKILL); the others finished"),
        ([(-11, 0), (-9, 1), (0, 2)], 0, "rank 0 was ended by signal 11 (SIGSEGV), rank 1 was ended by signal 9"),
        ([(-9, 1), (-9, 2), (-15, 0)], 143, "rank 2 was ended by signal 15 (SIGTERM) and was the first to fail"),
        ([(0, 0), (7, 1), (0, 0)], 7, "rank 1 ended with status 7"),
        ([(0, 1), (-9, 0), (7, 1)], 137, "rank 1 was ended by signal 9 (SIGKILL) and was the first to fail"),
    ],
)
def test_the_ranks_decide(
    starter_anywhere: str, tmp_path: Path, how: list[tuple[int, int]], status: int, text: str
) -> None:
    """`how`: the status of each rank, or -N for signal N, and its turn to end."""
    words = ["-np", "3", *CONTINUE, "--", "python", "-c", ENDS, json.dumps(how), str(tmp_path)]
    with Launched(tmp_path, words) as job:
        assert job.ends() == status, job.output
        job.leaves_nothing()
        assert text in job.output
        assert "\x1e" not in job.output
        assert ("sordino run: " in job.output) == bool(text)
