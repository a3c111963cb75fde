"""Checkpoints of `train.py`: one file, or a folder from whose newest complete checkpoint training resumes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import sordino.torch as hvd
from laboratory.common import together
from laboratory.options import FIXED
from sordino import checkpoint
from sordino.errors import SordinoError, UsageError


def is_folder(path: str) -> bool:
    """Return whether --checkpoint names a folder: it ends with a slash, or is an existing folder."""
    return path.endswith(os.sep) or Path(path).is_dir()


def write(args: argparse.Namespace, steps_done: int, state: dict[str, Any]) -> bool:
    """Write the checkpoint, on one rank. If that fails, warn on stderr and return False: training can continue."""
    state["args"] = {name: getattr(args, name) for name in FIXED}
    state["world_size"] = hvd.size()
    try:
        if is_folder(args.checkpoint):
            # A new start abandons the checkpoints in the folder. Otherwise a restart would resume from one of them.
            checkpoint.Folder(args.checkpoint).save(steps_done, state, drop_newer=args.resume is False)
        else:
            checkpoint.save(args.checkpoint, state)
    except SordinoError as error:
        print(f"train.py: warning: {error}", file=sys.stderr, flush=True)
        return False
    return True


def read(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the state to resume from, or None. Rank 0 reads it, because other machines may not have the file."""
    # Bytes, because each rank can decode them without executing code.
    content: bytes | None = hvd.broadcast_object(together(lambda: _bytes(args)), root_rank=0, name="train.checkpoint")
    if content is None:
        return None

    def decode() -> dict[str, Any]:
        try:
            state = checkpoint.decode(content, args.checkpoint)
        except UsageError as error:
            raise UsageError(f"{error}; move it away, or start anew with --no-resume") from error
        missing = {"model", "optimizer", "epoch", "step", "rng", "args", "world_size"} - state.keys()
        if missing:
            raise UsageError(f"{args.checkpoint}: not a checkpoint of train.py (it lacks {', '.join(sorted(missing))})")
        for name, then in state["args"].items():
            if getattr(args, name) != then:
                raise UsageError(
                    f"{args.checkpoint} was written with --{name.replace('_', '-')} {then}, not {getattr(args, name)}; "
                    "use the same options, another --checkpoint, or --no-resume to start anew"
                )
        return state

    return together(decode)


def _bytes(args: argparse.Namespace) -> bytes | None:
    if not args.checkpoint or args.resume is False or hvd.rank() != 0:
        return None
    path = Path(args.checkpoint)
    if is_folder(args.checkpoint):
        folder = checkpoint.Folder(path)
        newest = folder.newest()
        if newest is None and args.resume:
            raise UsageError(f"{path}: no complete checkpoint in this folder")
        if newest is None and folder.steps():
            print("train.py: warning: training starts anew", file=sys.stderr, flush=True)
        return None if newest is None else checkpoint.read(newest.path)
    return checkpoint.read(path) if args.resume or path.exists() else None
