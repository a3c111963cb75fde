"""Python processes that start at once, for tests that start several small jobs.

    [mpirun, "-np", "4", *forked.python(), "worker.py", ...]

A rank needs seconds for `import torch` alone. Here, one server imports it once, before it has any thread, MPI or
device, and then forks. A test starts a client (client.py) instead of Python, which takes milliseconds. The client gives
the server its arguments, environment, folder and standard streams, and then stands in for the fork: it ends when the
fork ends, and ends the fork when it is killed. So mpirun sees an ordinary process. /proc shows the job's cmdline and
environ for the fork, as for a real start.

A fork enters its client's namespaces, so it may be on an emulated host. Two differences from a real start remain: all
forks have one hash seed, and their parent is the server. Tests of exactly these things start real processes.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ADDRESS = "FORK_SERVER_OF_TESTS"  # environment variable by which clients find the server


def environment() -> dict[str, str]:
    """Return the variables that clients on other hosts need, as launchers do not pass them by themselves."""
    python()
    return {_ADDRESS: os.environ[_ADDRESS]}


@cache
def python() -> list[str]:
    """Return the words that replace `python` in a command; the first call starts the server."""
    folder = tempfile.mkdtemp(prefix="fork-server-")
    padding = {"PADDING": "x" * 65536}  # space for the environment that a fork shows
    # Standard input shows the server that this process lives. When this process ends in any way, the server ends as
    # well, with all forks.
    server = subprocess.Popen(
        [sys.executable, str(_HERE / "server.py"), f"{folder}/socket", "x" * 8192],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **padding, "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )

    def stop() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(20)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    assert server.stdout is not None and server.stdout.readline() == b"ready\n", "the fork server does not start"
    server.stdout.close()
    os.environ[_ADDRESS] = f"{folder}/socket"
    return [sys.executable, "-I", "-S", str(_HERE / "client.py")]
