"""`examples/train.py` with two signals that make a rank fail from within, at any point of its code.

python struck_train.py FOLDER ARGUMENT ...

SIGUSR1 ends the process by `_exit(3)`, SIGUSR2 raises in its main thread. Kills, stops and segmentation faults need no
help. FOLDER gets pid.START.RANK when both handlers are ready.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import NoReturn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.py"
STATUS = 3


def leave(*_: object) -> NoReturn:
    os._exit(STATUS)


def boom(*_: object) -> NoReturn:
    raise ValueError("boom of the victim")


if __name__ == "__main__":
    folder, *sys.argv[1:] = sys.argv[1:]
    signal.signal(signal.SIGUSR1, leave)
    signal.signal(signal.SIGUSR2, boom)
    rank = os.environ.get("SORDINO_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    name = f"pid.{os.environ.get('SORDINO_RESTART', 0)}.{rank}"
    draft = Path(folder, f"new.{name}")
    draft.write_text(str(os.getpid()))
    draft.rename(Path(folder, name))
    sys.path[0] = str(EXAMPLE.parent)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
