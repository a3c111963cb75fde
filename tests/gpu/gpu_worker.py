"""A rank of a job on GPUs (test_gpu_ranks.py): `[sordino run -np N] python gpu_worker.py FOLDER FILE_OF_CHECKS`.

Every check gets a world of its own; "NAME@WAY" is a check whose operations use a certain route. Rank r appends one line
per check to FOLDER/r.jsonl. With `--pretend D` the CPU's tensors stand for the memory of simulated GPU D; with `--cuda`
as well, for that of GPU D of the stand-in for CUDA (tests/cuda_on_cpu). With `--lose WHEN` the last rank kills itself
instead, and the others write the errors that they got to FOLDER/lost.r.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from checks.registry import wait_for_leftovers
from rank_seat import HOST, WAYS, LeftOut, Seat, all_checks, pretended

import sordino.torch as hvd
from sordino.algorithms import Crossover
from sordino.runtime.context import current, current_or_none

STUCK_S = min(120.0, 0.6 * float(os.environ.get("SORDINO_TEST_JOB_S", "420")))


def place(options: argparse.Namespace, folder: Path, number: int) -> Seat:
    """Return this rank's seat in the world that has just been made."""
    gpu = pretended(options.pretend, options.cuda)
    device, apart = HOST, False
    if gpu is None:
        count = torch.cuda.device_count()
        # By world ranks: all are on one machine, also where each counts as a node (SORDINO_RANKS_PER_NODE=1).
        device = torch.device("cuda", hvd.rank() % count)
        torch.cuda.set_device(device)
        apart = hvd.size() <= count
    current().host_device = gpu
    scratch = folder / f"scratch{number}"
    scratch.mkdir(exist_ok=True)
    route = os.environ.get("SORDINO_GPU_ROUTE", "")
    nodes = current().world.nodes
    return Seat(hvd.rank(), hvd.size(), str(scratch), device, gpu, apart, route, len(set(nodes)) == 1)


def run_checks(options: argparse.Namespace) -> None:
    checks = all_checks()
    for number, entry in enumerate(Path(options.file).read_text().split("\n")):
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        name, _, way = entry.partition("@")
        for variable, value in (WAYS[""] | WAYS[way]).items():
            os.environ[variable] = value
        hvd.init()
        seat = place(options, Path(options.folder), number)
        line = {"check": entry, "log": [], "error": None, "left_out": None, "ways": {}}
        begin = time.monotonic()
        with open(Path(options.folder) / f"{seat.rank}.jsonl", "a") as report:
            print(json.dumps({"begin": entry}), file=report, flush=True)
            try:
                checks[name].function(seat, *checks[name].arguments)
                wait_for_leftovers()
                line["log"] = seat.log
            except LeftOut as reason:
                line["left_out"] = str(reason)
            except BaseException as error:
                line["error"] = traceback.format_exc()
                context = current_or_none()
                if context is not None:
                    context.abort(f"{type(error).__name__}: {error}")
            context = current_or_none()
            line["ways"] = dict(context.world.gpu_operations) if context is not None else {}
            line["seconds"] = round(time.monotonic() - begin, 3)
            print(json.dumps(line), file=report, flush=True)
        hvd.shutdown()
    faulthandler.cancel_dump_traceback_later()


# ---- a rank that is lost ---------------------------------------------------------------------------------------------


def between(seat: Seat, strike: Callable[[], None]) -> None:
    tensor = torch.ones(100_000, device=seat.device)
    for turn in range(200):
        hvd.allreduce(tensor, name="between")
        if turn == 20:
            strike()


def under_way(seat: Seat, strike: Callable[[], None]) -> None:
    tensors = [torch.ones(4 << 20, device=seat.device) for _ in range(4)]
    for turn in range(200):
        handles = [hvd.allreduce_async_(tensor, name=f"{k}") for k, tensor in enumerate(tensors)]
        if turn == 5:
            strike()
        for handle in handles:
            hvd.synchronize(handle)


def exchange(seat: Seat, strike: Callable[[], None]) -> None:
    parameter = torch.nn.Parameter(torch.ones(4 << 20, device=seat.device))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), algorithm=Crossover())
    for turn in range(200):
        optimizer.step()
        if turn == 5:
            strike()


WHEN = {"between": between, "under way": under_way, "exchange": exchange}


def lose(options: argparse.Namespace) -> None:
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `sordino run` sends it soon, and kills this rank a second later
    hvd.init()
    folder = Path(options.folder)
    seat = place(options, folder, 0)

    def strike() -> None:
        if seat.rank == seat.last:
            (folder / "struck").write_text(json.dumps({"at": time.time()}))
            os.kill(os.getpid(), signal.SIGKILL)

    def kind(call: Callable[[], object]) -> str:
        try:
            call()
        except hvd.HorovodInternalError as error:
            return type(error).__name__
        return "nothing"

    try:
        WHEN[options.lose](seat, strike)
    except hvd.HorovodInternalError as error:
        report = {"kind": type(error).__name__, "ranks": list(getattr(error, "ranks", [])), "at": time.time()}
        ones = torch.ones(10, device=seat.device)
        report["later"] = [kind(lambda: hvd.allreduce(ones)), kind(lambda: hvd.allgather(ones))]
        hvd.shutdown()
        # The GPU and this rank's memory on it are still good.
        report["computes"] = float((ones * 2).sum())
        draft = folder / f"lost.{seat.rank}.part"
        draft.write_text(json.dumps(report | {"done": time.time()}))
        draft.rename(folder / f"lost.{seat.rank}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("file", nargs="?")
    parser.add_argument("--pretend", type=int, metavar="D")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--lose", choices=WHEN)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    if options.lose:
        lose(options)
    else:
        run_checks(options)


if __name__ == "__main__":
    main()
