"""A rank of a job that processes join: `python growing_worker.py FOLDER PLAN`.

PLAN is JSON, see `Plan`. FOLDER gets log.R, with a line of JSON for each step that rank R has taken, and before.R and
after.R with the parameters before and after processes have joined; R never changes. The gradient of a step depends on
R, on the step and on the parameters only, so a test can compute what the job must have computed.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import sordino.torch as hvd
from sordino.algorithms import class_of, configured
from sordino.errors import TransportError
from sordino.runtime.context import current
from sordino.runtime.recovery import growth

STUCK_S = 120
LEAVES_S = 0.3  # by which a process that leaves ends later
WIDTH = 12
RATE, MOMENTUM = 0.1, 0.5


@dataclass
class Plan:
    """Settings of a job.

    Attributes:
        algorithm: its name.
        settings: its settings, as on a command line.
        steps: number of steps.
        hold: step before which the ranks wait for others to join.
        size: number of ranks for which they wait; 0: they do not wait.
        kill: steps at whose beginning ranks kill themselves, by rank.
        strike: what happens to a rank while processes join, by rank: see `strike`.
        width: of the model, by rank; `WIDTH` for the others.
        meeting_s: seconds that ranks wait for newcomers.
        leave: steps after which ranks leave, by rank.
        outside: ranks that call step() without joining.
        members: ranks of a process set, whose members add up ones in each step.
        removes: whether the ranks remove that set before the hold, and add another one in the last step.
        device: of the parameters.
        compression: codec of the gradients.
        samples: instead of `steps`: two epochs of this number of samples, which an `ElasticSampler` divides.
    """

    algorithm: str = "allreduce"
    settings: list[str] = field(default_factory=list)
    steps: int = 12
    hold: int = 6
    size: int = 0
    kill: dict[str, int] = field(default_factory=dict)
    strike: dict[str, str] = field(default_factory=dict)
    width: dict[str, int] = field(default_factory=dict)
    meeting_s: float = 10.0
    leave: dict[str, int] = field(default_factory=dict)
    outside: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    removes: bool = False
    device: str = "cpu"
    compression: str = "none"
    samples: int = 0


def target(identity: int, step: int) -> torch.Tensor:
    """Return the parameters at which a rank's loss of a step has its minimum."""
    return torch.sin(torch.arange(WIDTH, dtype=torch.float64) * (identity + 1) + step)


def owed(state: Any) -> float:
    """Return the sum of the magnitudes of all residuals in a state."""
    if isinstance(state, torch.Tensor):
        return float(state.abs().sum())
    if isinstance(state, list):
        return sum(map(owed, state))
    if not isinstance(state, dict):
        return 0.0
    if "residuals" in state and "pieces" in state:
        return owed(state["residuals"])
    return sum(owed(value) for value in state.values() if isinstance(value, (dict, list)))


def die(*_: object) -> Any:
    """End this process as if the machine had lost power."""
    os.kill(os.getpid(), signal.SIGKILL)


def strike(where: str) -> None:
    """Make this process fail at a certain moment while processes join."""
    if where == "invited":  # a newcomer that does not come to the meeting
        current().start.grown_world = die
    elif where == "met":  # a rank that has formed the next world, and not said so
        form = current().start.grown_world

        def form_and_die(*arguments: Any) -> Any:
            form(*arguments)
            die()

        current().start.grown_world = form_and_die
    elif where == "adopted":  # in the next world, before its first operation
        growth._make_again = die
    elif where == "made":  # in the next world, before newcomers have its state
        make = growth._make_again

        def make_and_die(*arguments: Any) -> Any:
            make(*arguments)
            die()

        growth._make_again = make_and_die
    elif where == "stopped":  # a newcomer that comes to the meeting when all others have given it up
        meet = current().start.grown_world

        def stop_and_meet(*arguments: Any) -> Any:
            current().start.grown_world = meet
            time.sleep(1.5 * growth._MEETING_S)
            return meet(*arguments)

        current().start.grown_world = stop_and_meet
    elif where == "deaf":  # a rank that does not learn how the vote ends
        take = current().start.meeting.vote

        def take_and_forget(*arguments: Any) -> Any:
            take(*arguments)
            raise TransportError("the store is gone")

        current().start.meeting.vote = take_and_forget
    else:
        raise ValueError(where)


def add_another(step: int) -> None:
    """Add a process set of the first and the last rank, and use it with operations that have no names."""
    both = hvd.add_process_set([0, hvd.size() - 1])
    for _ in range(3 if both.included() else 0):
        total = hvd.allreduce(torch.tensor([float(step)]), op=hvd.Sum, process_set=both)
        assert total == 2 * step


def main(folder: Path, plan: Plan) -> None:
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    hvd.init(on_peer_lost="continue")
    me = current().identity
    model = torch.nn.Linear(plan.width.get(str(me), WIDTH), 1, bias=False, dtype=torch.float64)
    parameter = model.to(plan.device).weight
    with torch.no_grad():
        parameter.fill_(1.0 if current().newcomer is None else 100.0 + me)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    algorithm = configured(class_of(plan.algorithm), plan.algorithm, plan.settings)
    codec = hvd.Compression.none if plan.compression == "none" else plan.compression
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm, compression=codec)
    sampler = hvd.elastic.ElasticSampler(range(plan.samples))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0, epoch=0)
    signal.signal(signal.SIGTERM, lambda *_: state.leave())
    log = (folder / f"log.{me}").open("a", buffering=1)

    def note(name: str) -> None:
        (folder / f"{name}.{me}").write_text(json.dumps(parameter.flatten().tolist()))
        if plan.compression != "none" or any("compression" in one for one in plan.settings):
            (folder / f"owed-{name}.{me}").write_text(f"{owed(optimizer.state_dict())}")

    def gradient() -> None:
        parameter.grad = None
        loss = 0.5 * (parameter - target(me, state.step).to(plan.device)).square().sum()
        loss.backward()

    own = hvd.add_process_set(plan.members) if plan.members and current().newcomer is None else None
    (folder / f"pid.{me}").write_text(f"{os.getpid()}")
    if me in plan.outside:
        gradient()
        optimizer.step()
    while current().newcomer is not None and plan.size and not plan.samples and not any(folder.glob("before.*")):
        time.sleep(0.005)  # so that it joins at the hold, however slow the others are
    growth._MEETING_S = plan.meeting_s
    if str(me) in plan.strike:
        strike(plan.strike[str(me)])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        if hvd.size() == plan.size:
            note("after")
        while state.step < plan.steps:
            if plan.kill.get(str(me)) == state.step:
                die()
            if state.step == plan.hold and hvd.size() < plan.size:
                optimizer.flush()  # nothing changes the parameters in the background from here on
                note("before")
                time.sleep(0.02)
                state.commit()
                continue
            if plan.removes and state.step == plan.hold - 1 and own is not None:
                hvd.remove_process_set(own)
            gradient()
            optimizer.step()
            if plan.removes and state.step == plan.steps - 1:
                add_another(state.step)
            if own is not None and own.process_set_id is not None and own.included():
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=own) == len(own.ranks)
            log.write(json.dumps({"step": state.step, "ranks": current().identities, "at": time.time()}) + "\n")
            state.step += 1
            if state.step in plan.leave.values():
                note("before")
            if plan.leave.get(str(me)) == state.step:
                atexit.register(time.sleep, LEAVES_S)  # before Sordino's exit function, when the others have continued
                signal.raise_signal(signal.SIGTERM)
            state.commit()

    @hvd.elastic.run
    def train_on_samples(state: hvd.elastic.TorchState) -> None:
        visited = (folder / f"visited.{me}").open("a", buffering=1)
        while state.epoch < 2:
            for number, sample in enumerate(sampler):
                if plan.kill.get(str(me)) == state.step:
                    die()
                while state.step >= plan.hold and hvd.size() < plan.size:
                    time.sleep(0.02)
                    state.commit()
                gradient()
                optimizer.step()
                state.step += 1
                sampler.record_batch(number, 1)
                visited.write(f"{state.epoch} {sample}\n")
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    (train_on_samples if plan.samples else train)(state)
    optimizer.flush()
    note("end")
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Plan(**json.loads(sys.argv[2])))
