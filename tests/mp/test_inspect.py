"""`sordino inspect` names the rank that the others wait for, and shows where it is in the program."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import forked
import pytest
from checks.commands import SORDINO
from launched import Started
from pace import HANG_S
from ports import free_ports

RANKS = 3
WORKER = Path(__file__).with_name("inspect_worker.py")
LATE = {"new": 2, "first": 0, "repeated": 2, "message": 2, "held": 2, "stopped": 2}
"""Ways of coming late, and the rank that is late."""


def inspect(*words: str) -> tuple[int, str]:
    done = subprocess.run([*SORDINO, "inspect", *words], capture_output=True, text=True, timeout=HANG_S)
    return done.returncode, done.stdout + done.stderr


def worker(folder: Path, ranks: int) -> list[str]:
    """Return the command of a job of the worker, without the ways of coming late."""
    launch = [*SORDINO, "run", "--launcher", "local", "-np", str(ranks), "--"]
    return [*launch, *forked.python(), str(WORKER), str(folder)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("inspected")
    os.mkfifo(folder / "held")
    with Started(folder, [*worker(folder, RANKS), *LATE]) as started:
        yield folder, started


def end(folder: Path, stage: str) -> None:
    """Let the late rank of a stage continue."""
    (folder / stage).open("w").close()


@pytest.mark.parametrize("stage", LATE)
def test_who_is_late(job: tuple[Path, Started], stage: str) -> None:
    folder, started = job
    for earlier in list(LATE)[: list(LATE).index(stage)]:
        if not (folder / f"{earlier}.{LATE[earlier]}").exists():  # the test of that stage was not selected
            end(folder, earlier)
    late, others = LATE[stage], [rank for rank in range(RANKS) if rank != LATE[stage]]
    waiting = [0] if stage == "message" else others
    started.wait_for(lambda: all((folder / f"{stage}.{rank}").exists() for rank in waiting))
    pids = [(folder / f"pid.{rank}").read_text() for rank in range(RANKS)]
    time.sleep(0.2)
    if stage == "stopped":
        os.kill(int(pids[late]), signal.SIGSTOP)
    try:
        status, output = inspect(*pids)
    finally:
        os.kill(int(pids[late]), signal.SIGCONT)
        end(folder, stage)
    assert status == 0
    names = {"message": f"recv from rank {late}", "repeated": "'allreduce.repeated'"}
    name = names.get(stage, f"'allreduce.loss.{stage}'")
    line = next((line for line in output.splitlines() if name in line), "")
    ranks = "rank 0" if stage == "message" else f"ranks {others[0]}, {others[1]}"
    assert re.search(rf", \d+\.\d s: {ranks} waits? for rank {late}$", line), output
    assert f"rank {late} (process {pids[late]} on" in output
    if stage == "held":
        assert "holds the GIL" in output and f"py-spy dump --pid {pids[late]}" in output
    elif stage == "stopped":
        assert f"is stopped: `kill -CONT {pids[late]}`" in output
    else:
        assert "inspect_worker.py" in output and "in late" in output and "time.sleep(0.05)" in output


def test_without_ranks() -> None:
    status, output = inspect("1")
    assert status == 1 and "no ranks of this user have started here" in output


def test_answers_of_a_rank_are_json(tmp_path: Path) -> None:
    """A single rank that computes answers with no waits, its counters, and its stack."""
    script = "import time, torch, sordino.torch as h; h.init(); h.allreduce(torch.ones(2)); print('up', flush=True)"
    with Started(tmp_path, [sys.executable, "-c", f"{script}; time.sleep(99)"]) as started:
        started.wait_for(lambda: "up" in started.output)
        _, output = inspect("--json", str(started.front.pid))
        (answer,) = json.loads(output)
        (world,) = answer["worlds"]
        assert (world["rank"], world["size"], world["waits"]) == (0, 1, [])
        assert world["counters"]["operations"] == 1
        assert answer["threads"][0]["stack"][-1][:3] == ["<string>", 1, "<module>"]


def test_ranks_that_do_not_answer(tmp_path: Path) -> None:
    script = "import time, sordino.torch as h; h.init(); print('up', flush=True)"
    with Started(tmp_path, [sys.executable, "-c", f"{script}; time.sleep(99)"], {"SORDINO_INSPECT": "0"}) as started:
        started.wait_for(lambda: "up" in started.output)
        assert inspect(str(started.front.pid))[0] == 1


def test_counters_for_prometheus(tmp_path: Path) -> None:
    """Each rank has its own port. Counters grow, and a rank that waits reports for how long."""
    pytest.importorskip("prometheus_client")
    port = free_ports(2)
    os.mkfifo(tmp_path / "held")
    with Started(tmp_path, [*worker(tmp_path, 2), "new"], {"SORDINO_METRICS": f"127.0.0.1:{port}"}) as started:
        started.wait_for(lambda: (tmp_path / "new.0").exists())
        time.sleep(0.5)
        found = []
        for rank in range(2):
            with urlopen(f"http://127.0.0.1:{port + rank}/metrics", timeout=HANG_S) as page:
                lines = [line.rpartition(" ") for line in page.read().decode().splitlines() if line[0] != "#"]
            found.append({name: float(value) for name, _, value in lines})
        waiting, late = ('{rank="0",size="2"}', found[0]), ('{rank="1",size="2"}', found[1])
        for labels, numbers in (waiting, late):
            assert numbers[f"sordino_operations_total{labels}"] >= 4, numbers
            assert numbers[f"sordino_failed{labels}"] == 0
        assert waiting[1][f"sordino_pending_operations{waiting[0]}"] == 1
        assert waiting[1][f"sordino_longest_wait_seconds{waiting[0]}"] > 0.3
        (tmp_path / "new").touch()
        assert started.ends() == 0, started.output


@pytest.mark.parametrize(
    ("address", "told"), [("9400", "must be host:port"), ("localhost:x", "must be host:port"), ("::99999999", "must")]
)
def test_addresses_that_cannot_be(address: str, told: str) -> None:
    script = "import sordino.torch as h; h.init()"
    command, environment = [*forked.python(), "-c", script], {**os.environ, "SORDINO_METRICS": address}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and f"SORDINO_METRICS={address!r}: {told}" in done.stderr
