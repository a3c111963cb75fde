"""Random faults strike real ranks of `examples/train.py` from outside: any fault, moment, algorithm and mode.

In every case the job ends soon, with a status that shows the cause, and leaves nothing. Ranks that were not struck end
with an error of Sordino, or train to the end. `SORDINO_TEST_STRIKES` is the number of cases (200), `SORDINO_TEST_SEED`
selects them.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import forked
import pytest
from algorithm_table import SURVIVING, has
from launched import Launched, environ_of
from pace import stretched
from struck_train import STATUS

FAULTS = int(os.environ.get("SORDINO_TEST_STRIKES", 200))
SEED = int(os.environ.get("SORDINO_TEST_SEED", 21))
WORKER = Path(__file__).with_name("struck_train.py")
STEPS = 100
ENDS_WITHIN_S = 60  # on an idle machine
DEADLINE_S = 5  # for operations
SILENCE_S = 2

ALGORITHMS = [
    *(f"{name} --set patience=5" if has(one, "patience") else name for name, one in SURVIVING.items()),
    "crossover --set group_size=2",
    "push-sum --set overlap=1",
    "local-sgd --set group_size=2 --set exchange=allreduce",
    "scheduled-pull --set patience=5 --set schedule=manager",
]
REFUSED = ["layered", "local-sgd --set group_size=2"]  # refused in "continue"
STRIKES = {
    "kill": signal.SIGKILL,
    "segfault": signal.SIGSEGV,
    "_exit": signal.SIGUSR1,
    "exception": signal.SIGUSR2,
    "stop": signal.SIGSTOP,
}
CRASHES = ("Fatal Python error", "terminate called", "double free", "corrupted", "stack smashing")
BY_SIGNAL = "*** Process received signal ***"  # printed by Open MPI for a rank that a signal ends


@dataclass(frozen=True)
class Case:
    number: int
    mode: str
    algorithm: str
    ranks: int
    victims: dict[int, str]
    moment: str  # "starting", "training", "ending"
    step: int
    delay_s: float

    def __str__(self) -> str:
        struck = "+".join(f"{rank}{what}" for rank, what in self.victims.items())
        algorithm = self.algorithm.replace(" --set ", ",")
        return f"{self.number}-{self.mode}-{algorithm}-{self.ranks}-{self.moment}-{struck}"

    def status_of(self, victim: int) -> int:
        """Return the exit status of a rank as a shell reports it; 1 for a rank that the others leave out or give up."""
        what = self.victims[victim]
        if what == "exception":  # with fault tolerance, only a signal shows a failure
            return 137 if self.mode == "continue" else 1
        return {"_exit": STATUS, "stop": 1}.get(what) or 128 + STRIKES[what]

    def statuses(self, late: bool) -> set[int]:
        """Return the statuses that the job may have.

        Args:
            late: whether ranks may have ended before.
        """
        failures = {self.status_of(victim) for victim in self.victims}
        if self.moment == "starting" and "exception" in self.victims.values():
            failures |= {2}  # raised in the import of scikit-learn: the example says that it cannot be used
        if self.mode == "restart":
            return {0}
        if late:  # then the signals may end ranks that had raised, and a stopped rank is killed
            failures |= {0, 1, 128 + signal.SIGKILL, 128 + signal.SIGUSR1, 128 + signal.SIGUSR2}
        if self.mode == "raise":
            return failures
        stopped = sum(what == "stop" for what in self.victims.values())
        left = self.ranks - len(self.victims)
        if left <= stopped or self.moment == "starting":  # no quorum, or no two ranks have met
            failures |= {137}
        if stopped and "exception" in self.victims.values():  # it may come after the stopped rank was left out
            failures |= {0}
        if left > stopped and STATUS not in failures:
            return {0} | (failures if self.moment == "starting" or late else set())
        return failures


def case(number: int) -> Case:
    """Return the case with this number; it is the same in every run with this seed."""
    draw = random.Random(f"{SEED}.{number}")
    mode = draw.choice(["raise", "continue", "restart"])
    algorithm = draw.choice(ALGORITHMS + REFUSED * (mode != "continue"))
    ranks = 4 if "group_size" in algorithm else draw.choice([2, 3, 4])
    victims = draw.sample(range(ranks), draw.choice([1, 1, 2]))
    moment = draw.choice(["starting", "training", "training", "training", "ending"])
    delay_s = draw.uniform(0, {"starting": 1.5, "training": 0.05, "ending": 0.2}[moment])
    struck = {victim: draw.choice(list(STRIKES)) for victim in victims}
    return Case(number, mode, algorithm, ranks, struck, moment, draw.randrange(1, STEPS - 10), delay_s)


class Job(Launched):
    def __init__(self, folder: Path, case: Case) -> None:
        self.folder, self.case = folder, case
        options = ["--data", "digits", "--max-steps", str(STEPS), "--algorithm", *case.algorithm.split()]
        options += ["--log", str(folder / "steps"), "--json", str(folder / "results")]
        words = ["-np", str(case.ranks)]
        if case.mode == "continue":
            words += ["--on-peer-lost", "continue"]
        if case.mode == "restart":
            words += ["--restarts", "3"]
            options += ["--checkpoint", f"{folder}/saved/", "--checkpoint-every", "20"]
        for name, seconds in {"SILENCE": stretched(SILENCE_S), "TIMEOUT": stretched(DEADLINE_S)}.items():
            words += ["-x", f"SORDINO_{name}_S={seconds}"]
        super().__init__(folder, [*words, "--", *forked.python(), str(WORKER), str(folder), *options])

    def steps(self) -> int:
        try:
            return len((self.folder / "steps").read_bytes().splitlines())
        except FileNotFoundError:
            return 0

    def pid(self, rank: int) -> Path:
        return self.folder / f"pid.0.{rank}"

    def done(self) -> bool:
        """Return whether the ranks may have reached their end, or a victim has ended."""
        ended = any(not environ_of(int(self.pid(rank).read_text())) for rank in self.case.victims)
        return self.steps() >= STEPS or ended

    def due(self) -> bool:
        """Return whether the moment of the fault has come."""
        if self.case.moment == "starting":
            return all(self.pid(rank).exists() for rank in self.case.victims)
        return self.steps() >= (STEPS if self.case.moment == "ending" else self.case.step)

    def strike(self) -> None:
        """Strike all victims at once, except those that have ended."""
        for rank, what in self.case.victims.items():
            self.send(int(self.pid(rank).read_text()), STRIKES[what])


def errors_in(output: str) -> set[str]:
    """Return the names of errors that are not Sordino's, except errors that were being handled when another was
    raised."""
    handled = r"(?!.*\n\nDuring handling of the above exception)"
    return set(re.findall(rf"^([\w.]+(?:Error|Exception)): {handled}", output, re.MULTILINE))


def test_errors_that_were_being_handled_are_not_counted() -> None:
    handled = "TypeError: no len()\n\nDuring handling of the above exception, another exception occurred:\n\n"
    assert errors_in(f"{handled}Traceback\nValueError: boom\n") == {"ValueError"}
    assert errors_in("TypeError: no len()\n\nTraceback\nValueError: boom\n") == {"TypeError", "ValueError"}


@pytest.mark.drill("any fault")
@pytest.mark.parametrize("case", [case(number) for number in range(FAULTS)], ids=str)
def test_a_fault_ends_well(starter: str, tmp_path: Path, case: Case) -> None:
    with Job(tmp_path, case) as job:
        job.wait_for(job.due)
        time.sleep(case.delay_s)
        late = job.done()
        job.strike()
        status = job.ends(stretched(ENDS_WITHIN_S))
        print(f"{case}: status {status}\n{job.output}")
        assert status in case.statuses(late), f"not one of {case.statuses(late)}"
        job.leaves_nothing()
        assert not any(crash in job.output for crash in CRASHES)
        assert job.output.count(BY_SIGNAL) <= list(case.victims.values()).count("segfault")
        assert errors_in(job.output) <= {"ValueError"}, "errors that are not Sordino's"
        if 0 in case.victims and not (tmp_path / "results").exists():
            # Rank 0 was struck while it wrote the results: the steps after the moment of a strike take milliseconds.
            assert status != 0 or job.steps() >= STEPS
        elif status == 0:
            results = json.loads((tmp_path / "results").read_text())
            assert results["steps_done"] == STEPS
            assert results["replicas_equal"] or case.algorithm not in ("allreduce", "layered")
