"""A rank of a job that runs torch's own tests, by their names: `own_rank.py RANK SIZE RESULTS`.

Each line of stdin is a test and a folder: the rank makes a process group with the backend "sordino", runs the test,
ends the group, and writes the outcome to the file descriptor RESULTS as JSON: `{"outcome": ..., "reason": ...}`.
So one start of the processes serves many tests. After a failure the rank is of no further use, and ends.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import unittest
from datetime import timedelta
from typing import Any

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])
# torch's module reads them when it is imported.
os.environ |= {"WORLD_SIZE": str(SIZE), "RANK": str(RANK), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

import own_suite  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def outcome_of(name: str, folder: str) -> dict[str, str]:
    """Run a test, and return its outcome: passed, skipped or failed, with the reason."""
    os.environ["TEMP_DIR"] = folder
    test, module = own_suite.made(name, RANK, folder)
    limit = timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, own_suite.TIMEOUT_S))
    try:
        dist.init_process_group("sordino", f"file://{folder}/store", rank=RANK, world_size=SIZE, timeout=limit)
        test._barrier()
        own_suite.common_utils.set_rng_seed()
        getattr(test, name)()
        test._barrier()
    except unittest.SkipTest as skip:
        return {"outcome": "skipped", "reason": str(skip)}
    except SystemExit as end:
        reason = own_suite.skip_reason(end.code)
        return {"outcome": "skipped" if reason else "failed", "reason": reason or f"exits with {end.code}"}
    except BaseException:
        return {"outcome": "failed", "reason": traceback.format_exc()}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return {"outcome": "passed", "reason": ""}


def main() -> None:
    torch.set_num_threads(1)
    results: Any = os.fdopen(int(sys.argv[3]), "w")
    for line in sys.stdin:
        name, folder = line.split()
        outcome = outcome_of(name, folder)
        print(json.dumps(outcome), file=results, flush=True)
        if outcome["outcome"] == "failed":
            os._exit(1)  # an orderly end might wait for the other ranks


if __name__ == "__main__":
    main()
