"""Agent that starts a process of an elastic job: it passes on the launcher's signals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from launched import eventually

from sordino.launcher import agent
from sordino.launcher.processes import state_and_parent


def test_ctrl_z_stops_the_process() -> None:
    order = {"words": ["sleep", "60"], "folder": "/", "environment": {}, "slots": 1}
    command = [sys.executable, "-I", "-S", agent.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as one:
        assert one.stdin is not None

        def say(line: str) -> None:
            os.write(one.stdin.fileno(), line.encode() + b"\n")

        def becomes(states: str) -> bool:
            children = Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split()
            return bool(children) and state_and_parent(int(children[0]))[0] in states

        say(json.dumps(order))
        assert eventually(lambda: becomes("S"), 10)
        say("20")  # SIGTSTP
        assert eventually(lambda: becomes("T"), 10)
        say("18")  # SIGCONT
        assert eventually(lambda: becomes("S"), 10)
        say("9")
    assert one.returncode == 137
