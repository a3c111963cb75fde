"""Strangers that connect to the ports of a job have no effect: a port scan, noise, half-open connections."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import forked
import pytest
from checks.commands import SORDINO
from pace import HANG_S

from sordino._core import build_info

# Averages until the file argv[1] + "stop" exists, and prints whether all averages were right.
WORKER = """
import os, sys, pathlib, torch
import sordino.torch as hvd
torch.set_num_threads(1)
hvd.init()
folder = pathlib.Path(sys.argv[1])
(folder / f"pid.{hvd.rank()}").write_text(str(os.getpid()))
right, going = True, torch.ones(1)
while going.item():
    mean = hvd.allreduce(torch.full((50_000,), float(hvd.rank())))
    right = right and bool((mean == 0.5).all())
    going = hvd.broadcast(torch.tensor([float(not (folder / "stop").exists())]), root_rank=0)
os.write(1, f"{hvd.transport()} {'right' if right else 'wrong'}\\n".encode())
"""
NOISE = (b"", b"\0", os.urandom(64), os.urandom(70_000), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096)


def listening(pid: int) -> set[int]:
    """Return the TCP ports at which a process listens."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:  # closed meanwhile
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


@pytest.mark.parametrize("transport", ["local", "ucx"])
def test_strangers_at_the_ports_change_nothing(tmp_path: Path, transport: str) -> None:
    if transport == "ucx" and not build_info()["ucx"]:
        pytest.skip("this build has no UCX")
    environment = {**os.environ, "SORDINO_TRANSPORT": transport, "SORDINO_RANKS_PER_NODE": "1"}
    words = [*SORDINO, "run", "-np", "2", "--", *forked.python(), "-c", WORKER, str(tmp_path)]
    job = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    half_open = []
    try:
        deadline = time.monotonic() + HANG_S
        files = [tmp_path / f"pid.{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() for file in files):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        ports = set().union(*(listening(int(file.read_text())) for file in files))
        assert bool(ports) == (transport == "ucx")  # shared memory listens nowhere
        for port in ports:
            for noise in NOISE * 3:
                stranger = socket.create_connection(("127.0.0.1", port), timeout=10)
                try:
                    stranger.sendall(noise)
                except ConnectionError:  # the job closed the connection
                    stranger.close()
                    continue
                half_open.append(stranger)
        (tmp_path / "stop").touch()
        out, _ = job.communicate(timeout=HANG_S)
    finally:
        for stranger in half_open:
            stranger.close()
        job.kill()
        job.wait()
    assert job.returncode == 0
    told = out.splitlines()
    assert len(told) == 2 and all(line.startswith(transport) and line.endswith(" right") for line in told), told
