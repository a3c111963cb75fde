"""Training whose ranks are killed at random moments for minutes, compared with the same training without kills.

  python benchmarks/soak.py                      restart from checkpoints: 20 minutes, a kill every 30 s, 4 ranks
  python benchmarks/soak.py --mode continue      the other ranks continue; a restart after the loss of the last one

Trains on Fashion-MNIST with examples/train.py. A short trial shows how many steps the disturbed training can take in
--minutes; the undisturbed training takes as many. Then ranks are killed with SIGKILL at random moments, half to one and
a half intervals after the last kill: one rank or, with probability 1/4, two at once. Then the job takes its remaining
steps. Exit status 0 if all targets are met, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import jobs
from drills.course import course, lines_of, told
from drills.job import Job, Kill
from drills.report import REPORTS
from sordino.bench import command_line
from sordino.errors import SordinoError
from sordino.report import Results, machines, records, verdicts

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train.py"
_TRIAL_STEPS = 100
_ENDS_S = 2.0  # approximate time from a kill to the end of the job
_STUCK_S = 300.0
_POINTS = 1.0


@dataclass(frozen=True)
class Plan:
    """Settings of the training and of its kills."""

    example: Path
    ranks: int
    mode: str
    minutes: float
    every: float
    seed: int
    algorithm: str
    data: str
    checkpoint_every: int

    def moments(self) -> list[tuple[float, int]]:
        """Return the times of kills, in seconds since the job's start, and the number of ranks to kill at each."""
        generator, found, at = random.Random(self.seed), list[tuple[float, int]](), 0.0
        while True:
            at += self.every * generator.uniform(0.5, 1.5)
            count = 2 if generator.random() < 0.25 else 1
            if at > 60 * self.minutes:
                return found
            found.append((at, count))

    def words(self, folder: Path, steps: int, *run: str) -> list[str]:
        """Return the words of `sordino run` for a training that writes its files to `folder`."""
        words = ["-np", str(self.ranks), *run, "--", "python", str(self.example), "--data", self.data]
        words += ["--algorithm", self.algorithm, "--seed", str(self.seed)]
        # --max-steps ends the training, because an epoch has at least one step.
        words += ["--epochs", str(steps), "--max-steps", str(steps), "--json", str(folder / "results.json")]
        words += ["--log", str(folder / "steps.jsonl"), "--checkpoint", f"{folder / 'saved'}/"]
        return [*words, "--checkpoint-every", str(self.checkpoint_every)]


def undisturbed(plan: Plan, folder: Path, steps: int) -> Results:
    """Train for `steps` steps without kills; return the results and the times."""
    with Job(folder, plan.words(folder, steps)) as job:
        _finish(job, folder / "steps.jsonl")
        status = job.wait(time.time())
        if status != 0:
            raise SordinoError(f"the undisturbed training ended with status {status}:\n{job.output[-2000:]}")
        seconds = time.time() - job.begun
        lines, _ = lines_of(folder / "steps.jsonl")
        return {
            **_results(folder),
            "seconds": seconds,
            "start_seconds": lines[0].time - job.begun,
            "steps_per_second": (len(lines) - 1) / (lines[-1].time - lines[0].time),
            "course": course(lines, job.begun),
        }


def disturbed(plan: Plan, folder: Path, steps: int) -> Results:
    """Train for `steps` steps while ranks are killed; return the results and the consequences of the kills."""
    moments = plan.moments()
    how = ["--restarts", str(len(moments))] + (["--on-peer-lost", "continue"] if plan.mode == "continue" else [])
    log, kills = folder / "steps.jsonl", list[Kill]()
    with Job(folder, plan.words(folder, steps, *how)) as job:
        generator = random.Random(plan.seed)
        for at, count in moments:
            if _finish(job, log, job.begun + at) or (kill := _strike(job, count, generator)) is None:
                break
            kills.append(kill)
            records.log(f"{kill.time - job.begun:.0f} s: killed {_named(kill)} of {kill.alive}, start {kill.start}")
        _finish(job, log)
        seconds, status = time.time() - job.begun, job.wait(time.time())
        output, left = job.output, job.left()
    lines, torn = lines_of(log)
    left += [str(file) for file in (folder / "saved").glob(".*")]
    found = _results(folder) if status == 0 else {}
    restarts = output.count("sordino run: the job failed")
    kept: Results = {
        **found,
        "status": status,
        "seconds": seconds,
        "restarts": restarts,
        "restarts_unexplained": len(set(range(restarts)) - {kill.start for kill in kills}),
        "kills": told(kills, lines, job.begun),
        "steps_repeated": len(lines) - len({line.step for line in lines}),
        "steps_missing": len(set(range(1, steps + 1)) - {line.step for line in lines}),
        "lines_cut_by_kills": torn,
        "checkpoints_passed_over": output.count("checkpoint skipped"),
        "left": [machines.without_paths(one) for one in left],
        "course": course(lines, job.begun),
    }
    if status != 0:
        kept["output"] = machines.without_paths(output[-3000:])
    return kept


def _finish(job: Job, log: Path, until: float | None = None) -> bool:
    """Wait for the end of a job, at most until `until`; return whether it has ended.

    Raises:
        SordinoError: there was no step for _STUCK_S seconds.
    """
    while until is None or time.time() < until:
        if job.wait(min(until or time.time() + 1, time.time() + 1)) is not None:
            return True
        last = log.stat().st_mtime if log.exists() else job.begun
        if time.time() - last > _STUCK_S:
            raise job.stuck(f"the job has taken no step for {_STUCK_S:.0f} s")
    return False


def _strike(job: Job, count: int, generator: random.Random) -> Kill | None:
    """Kill up to `count` ranks as soon as any exist; return None if the job has ended."""
    while not (ranks := job.ranks()):
        if job.wait(time.time()) is not None:
            return None
        time.sleep(0.01)
    return job.kill(ranks, generator.sample(sorted(ranks), min(count, len(ranks))))


def _named(kill: Kill) -> str:
    return " and ".join(f"rank {rank}" for rank in kill.ranks)


def _results(folder: Path) -> Results:
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return {name: found[name] for name in ("test_accuracy", "parameters_sha256", "steps_done", "replicas_equal")}


def steps_for(plan: Plan, trial: Results) -> int:
    """Return the number of steps that fit into the disturbed training, by the start time and the rate of the trial."""
    rate = trial["steps_per_second"]
    share = 1 - (trial["start_seconds"] + _ENDS_S + plan.checkpoint_every / rate / 2) / plan.every
    if plan.mode == "continue":  # one of `ranks` kills ends the job
        share = 1 - (1 - share) / plan.ranks
    if share < 0.1:
        records.log(f"a start takes {trial['start_seconds']:.0f} s here, so hardly a step is taken between two kills")
    return max(int(rate * 60 * plan.minutes * max(share, 0.1)), _TRIAL_STEPS)


def judged(plan: Plan, calm: Results, stormy: Results) -> list[Results]:
    """Return the targets."""
    ended = stormy["status"] == 0
    points = 100 * (stormy["test_accuracy"] - calm["test_accuracy"]) if ended else None
    target = verdicts.target
    targets = [
        target("points of accuracy from the undisturbed run", None if points is None else abs(points), _POINTS, False),
        target("exit status", stormy["status"], 0, False),
        target("steps that were never taken", stormy["steps_missing"], 0, False),
        target("restarts that no kill explains", stormy["restarts_unexplained"], 0, False),
        target("processes and files left behind", len(stormy["left"]), 0, False),
    ]
    if plan.mode == "restart" and plan.algorithm == "allreduce":
        same = stormy.get("parameters_sha256") == calm["parameters_sha256"]
        targets.append(target("models with other bits than the undisturbed one", int(not same), 0, False))
    return targets


def soak(plan: Plan, folder: Path, steps: int | None) -> Results:
    """Run the trial, if `steps` is None, and both trainings."""
    trial = None
    if steps is None:
        trial = undisturbed(plan, folder / "trial", _TRIAL_STEPS)
        steps = steps_for(plan, trial)
    records.log(f"{steps} steps, undisturbed")
    calm = undisturbed(plan, folder / "undisturbed", steps)
    records.log(f"{calm['test_accuracy']:.2%} after {calm['seconds']:.0f} s; and with kills")
    stormy = disturbed(plan, folder / "disturbed", steps)
    described: dict[str, Any] = {name: value for name, value in vars(plan).items() if name != "example"}
    described |= {
        "steps": steps,
        "trial": trial and {name: trial[name] for name in ("start_seconds", "steps_per_second")},
    }
    return described | {"undisturbed": calm, "disturbed": stormy, "targets": judged(plan, calm, stormy)}


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--results", type=Path, metavar="DIR", help="where to write (default: benchmarks/results, else results)")
    add("--quick", action="store_true", help="3 minutes, unless told; writes nothing unless --results says where")
    add("--mode", choices=("restart", "continue"), default="restart", help="what follows a kill (default: restart)")
    add("--minutes", type=float, metavar="M", help="how long ranks are killed (default 20; 3 if --quick)")
    add("--every", type=float, default=30.0, metavar="S", help="seconds from kill to kill, on average (default 30)")
    add("--ranks", type=int, default=4, metavar="N", help="(default 4)")
    add("--seed", type=int, default=1, help="of the kills, and of the training (default 1)")
    add("--algorithm", default="allreduce", metavar="NAME", help="as of examples/train.py (default allreduce)")
    add("--data", default="fashion-mnist", metavar="NAME", help="as of examples/train.py (default fashion-mnist)")
    add("--checkpoint-every", type=int, default=50, metavar="N", help="steps between checkpoints (default 50)")
    add("--steps", type=int, metavar="N", help="steps to train (default: by a trial, as many as the time allows)")
    options = parser.parse_args(argv)
    if options.minutes is None:
        options.minutes = 3.0 if options.quick else 20.0
    for name in ("minutes", "every", "ranks", "checkpoint_every", "steps"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value}: must be above 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = _options(argv)
    names = ("ranks", "mode", "minutes", "every", "seed", "algorithm", "data", "checkpoint_every")
    plan = Plan(_EXAMPLE, **{name: getattr(options, name) for name in names})
    machine = jobs.machine_before()
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            found = soak(plan, Path(folder), options.steps)
    except SordinoError as error:
        return jobs.failed("soak", error)
    results: Results = {"benchmark": "soak", "name": f"soak_{plan.mode}", "machine": machine, **found}
    records.publish(results, command_line.results_folder(options), REPORTS)
    return 0 if all(one["met"] for one in found["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())
