"""Runs checks on this rank of an MPI job: `mpirun -np N python driver.py FOLDER FILE_OF_NAMES [GPU]`.

With the number of a simulated GPU all ranks take their tensors to be in its memory.

Every check gets a world of its own (init and shutdown around it). Rank r appends one line a check to FOLDER/r.jsonl.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sordino.torch as hvd
from checks.registry import all_checks
from sordino._core import sim_device
from sordino.context import current, current_or_none

STUCK_S = 240


def main() -> None:
    folder, names = Path(sys.argv[1]), Path(sys.argv[2]).read_text().split("\n")
    torch.set_num_threads(1)
    checks = all_checks()
    gpu = sim_device(int(sys.argv[3])) if len(sys.argv) > 3 else None
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    for number, name in enumerate(names):
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        check, scratch = checks[name], folder / f"scratch{number}"
        with open(folder / f"{rank}.jsonl", "a") as report:
            print(json.dumps({"begin": name}), file=report, flush=True)
            scratch.mkdir(exist_ok=True)
            line = {"check": name, "log": [], "error": None, "helper": False}
            try:
                hvd.init(algorithm=check.algorithm(size))
                current().pretended = gpu
                line["log"] = check.run("mpi", str(scratch))
            except SystemExit as end:  # of a helper
                line.update(helper=True, error=None if end.code == 0 else f"status {end.code}")
            except BaseException as error:
                line["error"] = traceback.format_exc()
                context = current_or_none()
                if context is not None:
                    context.abort(f"{type(error).__name__}: {error}")
            print(json.dumps(line), file=report, flush=True)
        hvd.shutdown()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
