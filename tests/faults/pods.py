"""Jobs of `growing_worker.py` whose processes are started like the pods of a cluster: with the variables of
torch.distributed, and again if they end with an error."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import forked
from growing import WORKER, Grown, clean_environment
from growing_worker import Plan
from pace import HANG_S
from torch.distributed import TCPStore

from sordino.launcher.processes import Ended
from sordino.rendezvous.store_admission import StoreAdmission, latest_job


class Pods:
    """Processes that meet at a store, which this process serves.

    Args:
        folder: folder for what they write.
        size: number of ranks.
        plan: what they do, or the words of another command.
        variables: of their environment.
    """

    def __init__(self, folder: Path, size: int, plan: Plan | list[str], **variables: str) -> None:
        self.folder, self._size = folder, size
        self.store: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self.store.port
        self._words = plan
        if isinstance(plan, Plan):
            self._words = [*forked.python(), str(WORKER), str(folder), json.dumps(asdict(plan))]
        self._variables = {"SORDINO_ON_PEER_LOST": "continue", **variables}
        self._output = (folder / "output").open("ab")
        self.running: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.statuses: dict[str, list[int]] = {}

    def is_over(self) -> bool:
        """Return whether the first rank has written to the store that the job is over."""
        assert self.store is not None
        return StoreAdmission(self.store, latest_job(self.store), 0, b"", HANG_S, HANG_S).is_over()

    def start(self, rank: int, **variables: str) -> None:
        """Start the pod of a rank, for the first time or again."""
        own = {"RANK": f"{rank}", "WORLD_SIZE": f"{self._size}", "MASTER_ADDR": "127.0.0.1"}
        own |= {"MASTER_PORT": f"{self.port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        self.add(f"{rank}", **own, **variables)

    def add(self, name: str, **variables: str) -> None:
        environment = {**clean_environment(), **self._variables, **variables}
        process = subprocess.Popen(self._words, env=environment, stdout=self._output, stderr=self._output)
        self.running.append((name, process))

    def join(self, name: str, **variables: str) -> None:
        """Start a process that `sordino join --store` would start."""
        own = {"SORDINO_NEWCOMER": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{self.port}"}
        self.add(name, **own, **variables)

    def ended(self, name: str) -> list[int]:
        """Return the statuses of the processes with this name that have ended, in the order of their ends."""
        for one in [one for one in self.running if one[1].poll() is not None]:
            self.running.remove(one)
            self.statuses.setdefault(one[0], []).append(one[1].returncode)
        return self.statuses.get(name, [])

    def run(self, again: int = 0) -> Grown:
        """Wait until all have ended. Pods that fail meanwhile are started again, `again` times in all."""
        limit = time.monotonic() + HANG_S
        seen = {name: len(done) for name, done in self.statuses.items()}
        while self.running:
            assert time.monotonic() < limit, self.text()
            self.ended("")
            for name, done in self.statuses.items():
                failed = any(done[seen.get(name, 0) :])
                seen[name] = len(done)
                if failed and again > 0:
                    again -= 1
                    self.start(int(name))
            time.sleep(0.01)
        failures = [done[-1] for done in self.statuses.values() if done[-1] != 0]
        return Grown(self.folder, Ended(failures[0] if failures else 0))

    def text(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def close(self) -> None:
        """End what still runs."""
        for _, process in self.running:
            process.kill()
        self._output.close()


@contextlib.contextmanager
def pods(folder: Path, size: int, plan: Plan | list[str], **variables: str) -> Iterator[Pods]:
    """Start the pods of all ranks, and end them after the block."""
    made = Pods(folder, size, plan, **variables)
    try:
        for rank in range(size):
            made.start(rank)
        yield made
    finally:
        made.close()
