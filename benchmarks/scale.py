"""Messages, bytes and memory of a rank, by the number of ranks.

  python benchmarks/scale.py                    # 64, 256 and 1024 ranks
  python benchmarks/scale.py --ranks 16,64,256

The ranks are threads of one process, on simulated nodes of 8. So messages and bytes are exact, but times are those of a
program with many threads on few cores. In each phase all ranks do the same work, and then wait for each other outside
of the library. Control messages and transfers are counted, also within nodes; data in a node's shared memory are not.

Each number of ranks has its own process, whose memory is measured too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import sordino.torch as hvd
from cluster import jobs
from sordino import sim
from sordino._core import SimNetwork
from sordino.algorithms import Crossover
from sordino.bench import command_line
from sordino.report import Results, records, verdicts
from timings.scale import REPORTS

NODE = 8
_RANKS = (64, 256, 1024)
_MOST_SQUARE = 256  # most ranks of an all-to-all, in which each rank holds a matrix of ranks x ranks


def _memory() -> int:
    """Return the bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Phases:
    """Counters of what ranks send in each phase. A phase begins and ends for all ranks together.

    Args:
        network: network of the ranks.
        size: number of ranks.
    """

    def __init__(self, network: SimNetwork, size: int) -> None:
        self._network, self._size = network, size
        self._meeting = threading.Barrier(size)
        self._sent: list[tuple[int, int]] = []
        self._began = 0.0
        self.found: list[Results] = []

    def run(self, name: str, work: Callable[[], object]) -> None:
        """Run this rank's work of a phase. Called by the threads of all ranks."""
        if self._meeting.wait() == 0:
            self._sent, self._began = self._network.sent(), time.perf_counter()
        self._meeting.wait()
        work()
        if self._meeting.wait() == 0:
            self.note(name)
        self._meeting.wait()

    def note(self, name: str) -> None:
        """Record what the ranks have sent since the phase began."""
        seconds = time.perf_counter() - self._began
        pairs = list(zip(self._network.sent(), self._sent))
        entry: Results = {"phase": name, "seconds": seconds}
        for place, what in enumerate(("messages", "bytes")):
            sent = [now[place] - before[place] for now, before in pairs]
            entry |= {what: sum(sent) / self._size, f"most_{what}": max(sent)}
        self.found.append(entry)
        self._sent, self._began = self._network.sent(), time.perf_counter()


def work(phases: Phases) -> None:
    """Go through all phases as one rank."""
    rank, size = hvd.rank(), hvd.size()
    values = torch.full((64,), float(rank))
    model = torch.nn.Linear(16, 16)
    phases.run("first operation", hvd.barrier)
    phases.run("all-reduce", lambda: hvd.allreduce(values, name="a"))
    for _ in range(3):
        hvd.allreduce(values, name="a")
    phases.run("all-reduce, repeated", lambda: hvd.allreduce(values, name="a"))
    phases.run("broadcast", lambda: hvd.broadcast(values, 0, name="b"))
    phases.run("all-gather of 4 bytes", lambda: hvd.allgather(values[:1], name="c"))
    phases.run("reduce-scatter", lambda: hvd.reducescatter(values.repeat(size // 64 + 1), name="d"))
    if size <= _MOST_SQUARE:
        phases.run("all-to-all of 4 bytes", lambda: hvd.alltoall(torch.zeros(size), name="e"))
    phases.run("new process set", lambda: hvd.add_process_set(range(0, size, 2)))
    made: list[Any] = []

    def optimizer() -> None:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        made.append(hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=Crossover()))

    def step() -> None:
        model(values[:16]).sum().backward()
        made[0].step()

    phases.run("optimizer of Crossover", optimizer)
    phases.run("first step of Crossover", step)
    phases.run("step of Crossover", step)
    phases.run("last step of Crossover", lambda: made[0].flush())


def measure(size: int) -> Results:
    """Return the counts for one number of ranks, which are threads of this process."""
    torch.set_num_threads(1)
    before, begin = _memory(), time.perf_counter()
    network = SimNetwork([rank // NODE for rank in range(size)])
    phases = Phases(network, size)
    sim.run(size, work, phases, network=network)
    phases.note("end")
    return {
        "ranks": size,
        "seconds": time.perf_counter() - begin,
        "memory": (_memory() - before) / size,
        "phases": phases.found,
    }


def growth(rows: Sequence[Results]) -> list[Results]:
    """Return the exponent of growth of each phase: 0 for a constant amount, 1 for growth in proportion to the ranks."""
    least, most = rows[0], rows[-1]
    factor = math.log(most["ranks"] / least["ranks"])
    found = []
    for one in least["phases"]:
        other = next((phase for phase in most["phases"] if phase["phase"] == one["phase"]), None)
        entry: Results = {"phase": one["phase"]}
        for what in ("messages", "most_messages", "bytes", "most_bytes"):
            ratio = other[what] / one[what] if other and one[what] > 0 else None
            entry[what] = None if not ratio else math.log(ratio) / factor
        found.append(entry)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or one number of ranks."""
    parser = argparse.ArgumentParser(
        prog="scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="where to write (default: benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="8, 16 and 32 ranks; writes only with --results")
    parser.add_argument("--ranks", metavar="N,...", help="numbers of ranks, rising (default 64,256,1024)")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        print(json.dumps(measure(options.one)))
        return 0
    sizes = [int(word) for word in options.ranks.split(",")] if options.ranks else list(_RANKS)
    if options.quick:
        sizes = [8, 16, 32]
    machine = jobs.machine_before()
    rows = []
    for size in sizes:
        done = subprocess.run(
            [sys.executable, __file__, "--one", f"{size}"], stdout=subprocess.PIPE, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        records.log(f"{size} ranks: {rows[-1]['seconds']:.1f} s, {rows[-1]['memory'] / 2**20:.2f} MiB of memory a rank")
    grown = growth(rows)
    logarithm = math.log(math.log2(sizes[-1]) / math.log2(sizes[0])) / math.log(sizes[-1] / sizes[0])
    own_data = ("all-gather", "all-to-all")
    results: Results = {
        "benchmark": "scale",
        "name": "scale",
        "machine": machine,
        "node": NODE,
        "logarithm": logarithm,
        "rows": rows,
        "growth": grown,
        "targets": [
            verdicts.target(
                f"{one['phase']}: exponent of the messages of the average rank",
                one["messages"],
                logarithm + 0.05,
                at_least=False,
            )
            for one in grown
            if not one["phase"].startswith(own_data)
        ],
    }
    records.publish(results, command_line.results_folder(options), REPORTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
