"""Workers of a DataLoader inherit a rank's environment and run the top of its script, but are not ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks.commands import SORDINO
from pace import HANG_S

# Several ranks may write to one pipe. Each line is a single write, which keeps lines whole.
HEAD = """
import os, sys, torch
import sordino.torch as hvd
from torch.utils.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([float(index), float(hvd.is_initialized())])

def train():
    context, workers = (sys.argv[1], 1) if hvd.rank() == 0 or sys.argv[1] == "fork" else (None, 0)
    loader = DataLoader(Numbers(), batch_size=2, num_workers=workers, multiprocessing_context=context)
    total = sum(batch[:, 0].sum() for batch in loader)
    assert hvd.allreduce(total).item() == 28
    os.write(1, f"trained {hvd.rank()} of {hvd.size()}\\n".encode())
"""
AT_THE_TOP = (
    HEAD
    + """
hvd.init()
if __name__ == "__main__":
    train()
"""
)
UNDER_MAIN = (
    HEAD
    + """
if __name__ == "__main__":
    hvd.init()
    train()
"""
)
WITH_A_RANK = (
    HEAD
    + """
hvd.init()
print("top of", hvd.rank(), flush=True)
if __name__ == "__main__":
    train()
"""
)
# A rank whose script sets the variables itself, after the process has begun.
SET_BY_THE_SCRIPT = (
    HEAD
    + """
for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ[name] = os.environ[f"MY_{name}"]
hvd.init()
if __name__ == "__main__":
    train()
"""
)
# A launcher: its children are the ranks.
SPAWNED = """
import os, sys, torch
import sordino.torch as hvd

def rank(number, port):
    os.environ.update(RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    hvd.init()
    assert hvd.allreduce(torch.tensor(float(number))).item() == 0.5
    os.write(1, f"trained {hvd.rank()} of {hvd.size()}\\n".encode())
    hvd.shutdown()

if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, args=(sys.argv[1],), nprocs=2)
"""
# A launcher that sets variables for its children, which are ranks from the top of the script on.
SET_BY_THE_PARENT = """
import multiprocessing, os, sys, torch
import sordino.torch as hvd

def train():
    assert hvd.allreduce(torch.tensor(float(hvd.rank()))).item() == 0.5
    os.write(1, f"trained {hvd.rank()} of {hvd.size()}\\n".encode())

if __name__ != "__main__":  # in a child
    hvd.init()
else:
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    children = [multiprocessing.get_context("spawn").Process(target=train) for _ in range(2)]
    for number, child in enumerate(children):
        os.environ["RANK"] = str(number)
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
"""
# A process that is started as a rank, but each trial uses a new child as the rank.
TRIAL = """
import os, torch
import sordino.torch as hvd

def trial():
    hvd.init()
    assert hvd.allreduce(torch.tensor(float(hvd.rank()))).item() == (hvd.size() - 1) / 2
    os.write(1, f"trained {hvd.rank()} of {hvd.size()}\\n".encode())

if __name__ == "__main__":
    child = torch.multiprocessing.get_context("spawn").Process(target=trial)
    child.start()
    child.join()
    assert child.exitcode == 0
"""
# A rank that starts a program which calls init(), and then one that starts a job.
PROGRAM = """
import subprocess, sys
import sordino.torch as hvd

hvd.init()
script = "import sordino.torch as hvd; hvd.init(); print('ran as', hvd.rank(), 'of', hvd.size())"
for words in ([], [sys.executable, "-m", "sordino.cli", "run", "-np", "1", "--"]):
    done = subprocess.run([*words, sys.executable, "-c", script], capture_output=True, text=True)
    print(done.returncode, (done.stdout or done.stderr).splitlines()[-1])
"""


def run(words: list[str], text: str, argument: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SORDINO_", "OMPI_"))}
    return subprocess.run(
        [*words, sys.executable, str(script), argument],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**clean, **more, "OMP_NUM_THREADS": "1"},
    )


def ranks(count: int) -> list[str]:
    return [*SORDINO, "run", "-np", str(count), "--"]


@pytest.mark.drill("workers of a DataLoader")
@pytest.mark.parametrize(
    ("method", "script", "count"),
    [("spawn", AT_THE_TOP, 2), ("forkserver", AT_THE_TOP, 1), ("fork", AT_THE_TOP, 1), ("spawn", UNDER_MAIN, 1)],
    ids=["spawn", "forkserver", "fork", "spawn under main"],
)
def test_workers_do_not_join(method: str, script: str, count: int, tmp_path: Path) -> None:
    done = run(ranks(count), script, method, tmp_path)
    assert done.returncode == 0, done.stderr
    trained = [line for line in done.stdout.splitlines() if line.startswith("trained")]
    assert sorted(trained) == [f"trained {rank} of {count}" for rank in range(count)]


@pytest.mark.drill("processes that a rank starts")
def test_a_worker_that_asks_for_its_rank_is_told_why_it_has_none(tmp_path: Path) -> None:
    done = run(ranks(1), WITH_A_RANK, "spawn", tmp_path)
    assert done.returncode != 0
    assert "rank 0 has started this process by multiprocessing" in done.stderr
    assert "under `if __name__ == '__main__':`" in done.stderr


@pytest.mark.drill("processes that a rank starts")
def test_variables_that_a_script_has_set(tmp_path: Path, free_port: int) -> None:
    more = {"MY_WORLD_SIZE": "2", "MY_MASTER_ADDR": "127.0.0.1", "MY_MASTER_PORT": str(free_port)}
    script = tmp_path / "other.py"
    script.write_text(SET_BY_THE_SCRIPT)
    words, environment = [sys.executable, str(script), "spawn"], {**os.environ, **more, "MY_RANK": "1"}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as other:
        done = run([], SET_BY_THE_SCRIPT, "spawn", tmp_path, MY_RANK="0", **more)
        said, _ = other.communicate(timeout=HANG_S)
    assert (done.returncode, other.returncode) == (0, 0), done.stderr
    assert sorted([*done.stdout.splitlines(), *said.splitlines()]) == ["trained 0 of 2", "trained 1 of 2"]


@pytest.mark.drill("children that are ranks")
@pytest.mark.parametrize("script", [SPAWNED, SET_BY_THE_PARENT], ids=["by their task", "by their parent"])
def test_children_that_are_told_who_they_are_are_ranks(script: str, tmp_path: Path, free_port: int) -> None:
    """This also holds if the process that starts them is a rank of another system."""
    others = {"SLURM_PROCID": "0", "RANK": "0", "WORLD_SIZE": "1"}
    done = run([], script, str(free_port), tmp_path, **others)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["trained 0 of 2", "trained 1 of 2"]


@pytest.mark.drill("processes that a rank starts")
@pytest.mark.parametrize("count", [1, 2])
def test_a_child_of_a_process_that_is_no_rank_may_be_one(count: int, tmp_path: Path) -> None:
    done = run(ranks(count), TRIAL, "", tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"trained {rank} of {count}" for rank in range(count)]


@pytest.mark.drill("processes that a rank starts")
def test_a_program_that_a_rank_starts_is_not_that_rank(tmp_path: Path) -> None:
    done = run(ranks(1), PROGRAM, "", tmp_path)
    assert done.returncode == 0, done.stderr
    program, job = done.stdout.splitlines()
    assert program.startswith("1 ") and "rank 0 (process " in program and "`env -u SORDINO_RENDEZVOUS ...`" in program
    assert job == "0 ran as 0 of 1"
