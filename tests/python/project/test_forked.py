"""The fork server of the tests: its forks look like Python processes, to their starter and in /proc."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest

SAYS = """
import os, pathlib, sys, threading
main = threading.main_thread()
threading.Thread(target=lambda: (main.join(), print("thread"))).start()  # who waits for it at the end?
shown = pathlib.Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").split(b"\\0")
environ = pathlib.Path("/proc/self/environ").read_bytes().split(b"\\0")
print(sys.argv, os.getcwd(), [word.decode() for word in shown[1:]], b"MARK=x y" in environ, os.environ["MARK"])
sys.exit(int(sys.argv[1]))
"""


def test_what_it_is_told_and_shows(tmp_path: Path) -> None:
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    env = os.environ | {"MARK": "x y"}
    done = subprocess.run(
        [*forked.python(), str(script), "3"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stderr
    wanted = f"{[str(script), '3']} {tmp_path} {[str(script), '3']} True x y"
    assert sorted(done.stdout.splitlines()) == sorted([wanted, "thread"])


@pytest.mark.parametrize(
    ("program", "status", "text"),
    [
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os._exit(7)", 7, ""),
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("import sys; sys.exit('words')", 1, "words"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        ("import atexit; atexit.register(print, 'bye')", 0, "bye"),
        ("import os, signal; os.kill(os.getppid(), 0); signal.raise_signal(signal.SIGTERM)", -15, ""),
    ],
)
def test_it_ends_as_python_does(program: str, status: int, text: str) -> None:
    done, real = (
        subprocess.run([*words, "-c", program], capture_output=True, text=True, timeout=60)
        for words in (forked.python(), [sys.executable])
    )
    assert done.returncode == real.returncode == status
    assert text in done.stdout + done.stderr


def test_forks_do_not_draw_the_same_numbers() -> None:
    program = "import random, numpy; print(random.random(), numpy.random.random())"
    drawn = [
        number
        for _ in range(2)
        for number in subprocess.run([*forked.python(), "-c", program], capture_output=True, timeout=60).stdout.split()
    ]
    assert len(set(drawn)) == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_ends_the_client_ends_the_fork(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "pid"
    program = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()}.'); time.sleep(99)"
    with subprocess.Popen([*forked.python(), "-c", program, str(file)]) as client:
        while not (file.exists() and file.read_text().endswith(".")):
            assert client.poll() is None
            time.sleep(0.01)
        client.send_signal(number)
        assert client.wait(60) == -number
    fork = Path("/proc", file.read_text().rstrip("."))
    limit = time.monotonic() + 60
    while fork.exists():
        assert time.monotonic() < limit, "the fork outlives its client"
        time.sleep(0.01)


def test_other_packages_are_imported_for_real(tmp_path: Path) -> None:
    """A fork would have the packages that the server has imported."""
    (tmp_path / "sordino").mkdir()
    (tmp_path / "sordino" / "__init__.py").write_text("here = 'other'")
    command = [*forked.python(), "-c", "import sordino; print(sordino.here)"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout == "other\n"


def test_a_client_that_is_killed_with_its_fork_ends_no_other(tmp_path: Path) -> None:
    """A slow server hears of both ends at once."""
    words = forked.python()
    (server,) = [int(entry.name) for entry in Path("/proc").iterdir() if is_server(entry)]
    for turn in range(3):
        file = tmp_path / f"pid.{turn}"
        program = (
            "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()}.'); time.sleep(99)"
        )
        with subprocess.Popen([*words, "-c", program, str(file)]) as client:
            while not (file.exists() and file.read_text().endswith(".")):
                assert client.poll() is None
                time.sleep(0.01)
            os.kill(server, signal.SIGSTOP)
            try:
                fork = int(file.read_text().rstrip("."))
                os.kill(fork, signal.SIGKILL)
                while Path(f"/proc/{fork}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    time.sleep(0.001)
                client.kill()
                client.wait(60)
            finally:
                os.kill(server, signal.SIGCONT)
        done = subprocess.run(
            [*words, "-c", "import os; print(os.getppid())"], capture_output=True, text=True, timeout=60
        )
        assert int(done.stdout) == server


def test_a_client_that_is_stopped_does_not_stop_the_others(tmp_path: Path) -> None:
    words = forked.python()
    with socket.socket(socket.AF_UNIX) as half:
        half.connect(os.environ["FORK_SERVER_OF_TESTS"])
        half.send(bytes(3))
        with socket.socket(socket.AF_UNIX) as begun:
            begun.connect(os.environ["FORK_SERVER_OF_TESTS"])
            socket.send_fds(begun, [(1000).to_bytes(8, "little")], [0, 1, 2])
            begun.send(b"{")
            done = subprocess.run([*words, "-c", "print(1)"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n"


def is_server(entry: Path) -> bool:
    """Return whether this entry of /proc is the server of this process."""
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
        parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return False
    return int(parent) == os.getpid() and any(word.endswith(b"forked/server.py") for word in words)
