"""A rank that continues to train when others are lost: `mpirun -np N python surviving_worker.py FOLDER PLAN`.

PLAN is JSON: `algorithm`, `steps`, `faults` (each: `victim`, `step`, `when`, `what`), and more: see `Plan`. FOLDER gets
pid.R, step.R (when it has trained a little), fault.R (when a fault strikes), resized.R (the numbers of ranks, and the
times of changes) and report.R (at the end, or at the error that ended it). R is the rank that the process had first.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import sordino.torch as hvd
from sordino.runtime.context import current

STUCK_S = 250


@dataclass
class Plan:
    """The algorithm, the steps, the faults and the pace of a run."""

    algorithm: str = "allreduce"
    steps: int = 18
    width: int = 64  # of the model: 2048 is 16 MiB of parameters
    pause_s: float = 0.0  # after each step
    faults: list[dict[str, Any]] = field(default_factory=list)
    wait_for: str = ""  # a file in the folder, before the last steps
    slow: dict[str, float] = field(default_factory=dict)  # additional seconds of each step, by rank
    slow_from: int = 0  # the first of these steps


def write(path: Path, content: object) -> None:
    """Write the whole file or nothing: a reader must not see half of it."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(content))
    draft.rename(path)


class Worker:
    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.me = current().identity
        self.resized: list[dict[str, Any]] = []
        self.under_way = threading.Event()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, plan.width), torch.nn.ReLU(), torch.nn.Linear(plan.width, plan.width),
            torch.nn.ReLU(), torch.nn.Linear(plan.width, 4),
        ).double()  # fmt: skip
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters(), algorithm=plan.algorithm)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.on_resize(self.note_resize)
        self.first_loss = self.test_loss()
        self.seconds: list[float] = []
        self.sizes: list[int] = []

    def note_resize(self, before: int, now: int) -> None:
        self.resized.append({"at": time.time(), "before": before, "now": now, "sha256": self.sha256()})
        write(self.folder / f"resized.{self.me}", self.resized)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()

    def strike(self, fault: dict[str, Any]) -> None:
        write(self.folder / f"fault.{self.me}", {"at": time.time(), "under_way": self.under_way.is_set()})
        what = fault["what"]
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "raise":
            raise ValueError("boom of the victim")
        elif what == "exit":
            sys.exit(0)
        elif what == "_exit":
            os._exit(0)
        elif what == "sleep":
            time.sleep(fault["seconds"])
        elif what == "wait":
            while not (self.folder / fault["for"]).exists():
                time.sleep(0.01)
        elif what == "hold":
            hold_the_gil(fault["seconds"])

    def mine(self, step: int, when: str) -> dict[str, Any] | None:
        for fault in self.plan.faults:
            if fault["victim"] == self.me and fault["step"] == step and fault["when"] == when:
                return fault
        return None

    def take_step(self, step: int) -> None:
        began = time.monotonic()
        if fault := self.mine(step, "between"):
            self.strike(fault)
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * self.me + step)
        x = torch.randn(8, 16, generator=generator, dtype=torch.float64)
        hidden = self.model[:2](x)
        if fault := self.mine(step, "backward"):
            hidden.register_hook(lambda grad: self.strike(fault))
        loss = ((self.model[2:](hidden) - x[:, :4]) ** 2).mean()
        loss.backward()
        if fault := self.mine(step, "exchange"):
            # Another thread strikes when this one is in the exchange.
            threading.Thread(target=self.strike_later, args=(fault,), daemon=True).start()
        self.under_way.set()
        self.optimizer.step()
        self.under_way.clear()
        slower = self.plan.slow.get(str(self.me), 0.0) if step >= self.plan.slow_from else 0.0
        time.sleep(self.plan.pause_s + slower)
        self.seconds.append(time.monotonic() - began)
        self.sizes.append(hvd.size())
        if step == 3:
            write(self.folder / f"step.{self.me}", {})

    def strike_later(self, fault: dict[str, Any]) -> None:
        self.under_way.wait()
        time.sleep(fault.get("after_s", 0.002))
        self.strike(fault)

    def run(self) -> dict[str, Any]:
        for step in range(self.plan.steps):
            if step == self.plan.steps - 5 and self.plan.wait_for:
                while not (self.folder / self.plan.wait_for).exists():
                    time.sleep(0.01)
            self.take_step(step)
        everybody: list[int] = hvd.allgather_object(self.me)
        loss = hvd.allreduce(torch.tensor([self.test_loss()], dtype=torch.float64))
        return {"members": everybody, "loss": float(loss)}

    @torch.no_grad()
    def test_loss(self) -> float:
        """Return the loss on data that no rank trains on."""
        x = torch.randn(256, 16, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        return ((self.model(x) - x[:, :4]) ** 2).mean().item()

    def report(self) -> dict[str, Any]:
        return {
            "first_loss": self.first_loss,
            "sizes": self.sizes,
            "seconds": self.seconds,
            "sha256": self.sha256(),
            "rank": hvd.rank(),
            "size": hvd.size(),
            "finite": all(bool(p.isfinite().all()) for p in self.model.parameters()),
            "resized": self.resized,
            "ages": list(self.optimizer.statistics.ages) if self.plan.algorithm == "scheduled-pull" else [],
        }


def hold_the_gil(seconds: float) -> None:
    """Run code that does not let other Python threads run."""
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def main() -> None:
    folder, plan = Path(sys.argv[1]), Plan(**json.loads(sys.argv[2]))
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    torch.set_num_threads(1)
    rank = int(
        next(os.environ[name] for name in ("SORDINO_RANK", "RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
    )
    write(folder / f"pid.{rank}", {"pid": os.getpid()})
    hvd.init(on_peer_lost="continue")
    worker = Worker(folder, plan)
    report: dict[str, Any] = {}
    try:
        report = worker.run()
        report["ended"] = "well"
    except hvd.HorovodInternalError as error:
        report = {"ended": type(error).__name__, "text": str(error)}
    report |= worker.report() | {"at": time.time()}
    write(folder / f"report.{rank}", report)
    if report["ended"] != "well":
        print(f"rank {rank}: {report['ended']}: {report['text']}", file=sys.stderr, flush=True)
        sys.exit(3)
    hvd.shutdown()


if __name__ == "__main__":
    main()
