"""Jobs of `turn_worker.py`, in which operations repeat and a fault strikes in one of their turns."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import forked
from launched import eventually
from pace import HANG_S

from sordino.rendezvous.server import RendezvousServer

WORKER = Path(__file__).with_name("turn_worker.py")
_TOKEN = "of a drill"


class TurnJob:
    """Ranks on this machine, without a launcher, which would end the other ranks soon after the victim.

    Args:
        folder: folder of the job's files.
        ranks: number of ranks.
        plan: plan of the worker.
        per_node: ranks of each node; 0 is all.
        variables: environment variables of the ranks.
    """

    def __init__(self, folder: Path, ranks: int, plan: dict[str, Any], per_node: int = 0, **variables: str) -> None:
        self.folder, self.ranks = folder, ranks
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SORDINO_", "HOROVOD_"))}
        clean |= {
            "SORDINO_RENDEZVOUS": str(folder / "meet"),
            "SORDINO_TOKEN": _TOKEN,
            "SORDINO_SIZE": str(ranks),
            "SORDINO_RANKS_PER_NODE": str(per_node),
            "SORDINO_TRANSPORT": "ucx" if per_node else "local",
            **variables,
        }
        self._events = selectors.DefaultSelector()
        self._server = RendezvousServer(folder / "meet", _TOKEN.encode(), self._events, ranks)
        self._over = False
        self._answering = threading.Thread(target=self._answer)
        command = [*forked.python(), str(WORKER), str(folder), json.dumps(plan)]
        with open(folder / "output", "wb") as output:
            self.processes = [
                subprocess.Popen(command, stdout=output, stderr=output, env={**clean, "SORDINO_RANK": str(rank)})
                for rank in range(ranks)
            ]
        self._answering.start()

    def _answer(self) -> None:
        while not self._over:
            for key, _ in self._events.select(0.05):
                key.data()

    def __enter__(self) -> TurnJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait(HANG_S)
        self._over = True
        self._answering.join()
        self._server.close()
        self._events.close()

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def read(self, name: str) -> Any:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def wait_for(self, name: str) -> Any:
        there = eventually((self.folder / name).exists, HANG_S)
        assert there, f"waited for {name}, found {sorted(os.listdir(self.folder))}\n{self.output}"
        return self.read(name)

    def wait_until_stopped(self, victim: int) -> int:
        """Wait until the rank's process is stopped; return its number."""
        pid = int(self.wait_for(f"fault.{victim}")["pid"])
        stopped = eventually(lambda: state_of(pid) == "T", HANG_S)
        assert stopped, f"rank {victim} is not stopped\n{self.output}"
        return pid

    def wake(self, victim: int, after_s: float) -> None:
        """Let the stopped rank continue after some seconds."""
        pid = self.wait_until_stopped(victim)
        time.sleep(after_s)
        (self.folder / f"fault.{victim}").unlink()
        os.kill(pid, signal.SIGCONT)

    def reports(self, without: int = -1) -> dict[int, Any]:
        """Wait until all ranks end, and check that no files of theirs remain in /dev/shm. Return all reports except
        that of rank `without`."""
        for rank, process in enumerate(self.processes):
            try:
                process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} hangs\n{self.output}") from None
        found = {rank: self.read(f"report.{rank}") for rank in range(self.ranks) if rank != without}
        assert all(found.values()), f"{found}\n{self.output}"
        struck = self.read(f"fault.{without}") or {"names": []}
        names = {name for report in [struck, *found.values()] for name in report["names"]}
        left = [name for name in names if Path(name).exists()]
        assert not left, f"left behind: {left}"
        return found


def state_of(pid: int) -> str:
    """Return the state of a process as in /proc/PID/stat; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
