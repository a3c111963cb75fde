"""Run checks on this rank of a job of processes: `mpirun -np N python driver.py FOLDER ORDERS`, or `sordino run`.

ORDERS is JSON: a list of checks. Each check has the environment variables of its world, and a flag: whether all ranks
treat their tensors as memory of one simulated GPU.

Every check gets a world of its own (init and shutdown around it). Rank r appends two lines per check to FOLDER/r.jsonl:
the order's name at the start, and at the end the outcome and the duration in seconds.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sordino.torch as hvd
from checks.registry import all_checks
from sordino._core import sim_device
from sordino.runtime.context import current, current_or_none

STUCK_S = 240


def main() -> None:
    folder, orders = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    checks = all_checks()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    gpu = None
    for number, order in enumerate(orders):
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        check, scratch = checks[order["check"]], folder / f"scratch{number}"
        os.environ.update(order["environment"])
        if order["gpu"] and gpu is None:
            gpu = sim_device(0)
        with open(folder / f"{rank}.jsonl", "a") as report:
            print(json.dumps({"name": order["name"], "error": None}), file=report, flush=True)
            scratch.mkdir(exist_ok=True)
            line = {"name": order["name"], "log": [], "error": None, "helper": False}
            began = time.monotonic()
            try:
                hvd.init(algorithm=check.algorithm(size))
                current().host_device = gpu if order["gpu"] else None
                line["log"] = check.run("processes", str(scratch))
            except SystemExit as end:  # raised on a helper
                line.update(helper=True, error=None if end.code == 0 else f"status {end.code}")
            except BaseException as error:
                line["error"] = traceback.format_exc()
                context = current_or_none()
                if context is not None:
                    context.abort(f"{type(error).__name__}: {error}")
            hvd.shutdown()
            line["seconds"] = round(time.monotonic() - began, 3)
            print(json.dumps(line), file=report, flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
