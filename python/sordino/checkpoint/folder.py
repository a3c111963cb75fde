"""A folder of checkpoints, one a step: the newest complete one is found, whatever a crash has left beside it.

`step-00000120.pt` is a checkpoint if and only if it is there and whole. It holds the state, or the names of the shards
that do, and is written last, by a rename. Shards have random names, so one of an attempt that failed is never taken for
one of another.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sordino.checkpoint.files import decode, load, read, save
from sordino.checkpoint.pieces import checked, encoded, joined
from sordino.errors import SordinoError, UsageError

if TYPE_CHECKING:
    from sordino.torch.process_sets import ProcessSet

T = TypeVar("T")
_NAME = re.compile(r"\.?step-(\d{8,})\.(?:pt|[0-9a-f]{16}\.shard)(?:\.tmp)?")
_SHARD = re.compile(r"step-\d{8,}\.[0-9a-f]{16}\.shard")
_SHARDS = "sordino_shards"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint of a folder: its step, its file, and the state in it."""

    step: int
    path: Path
    state: dict[str, Any]


class Folder:
    """Checkpoints in a folder, which is made if it is not there.

    Args:
        path: its parent must exist. For `save_shards` it must be one that all ranks see.
        keep: how many checkpoints stay; older ones are removed when a newer one is complete.

    Raises:
        UsageError: `keep` is not 1 or more, or the folder cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise UsageError(f"Folder(keep={keep}): must be 1 or more")
        self.path, self.keep = Path(path), keep
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path}: the folder cannot be made ({error.strerror})") from error

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes the checkpoint of a step. One rank calls it.

        Those of later steps are removed as well: they are of a course that this one replaces.

        Raises:
            UsageError, SordinoError: as `sordino.checkpoint.save`; what was there before still is.
        """
        save(self._file(step), state)
        self._remove_others(step, ())

    def save_shards(self, step: int, part: dict[str, Any], process_set: ProcessSet | None = None) -> None:
        """Writes the checkpoint of a step, of which each rank has a part. Collective over the process set (all ranks).

        It is complete when this returns. If a rank dies or fails meanwhile, it is not there.

        Args:
            step: its number, the same on all ranks.
            part: as of `save`, but tensors may be `Piece`s. `share` makes one from a state that all ranks have.

        Raises:
            SordinoError: on all ranks, if one of them cannot write; what was there before still is.
            PeerLost: a rank is gone.
        """
        shard = self._file(step).with_suffix(f".{secrets.token_hex(8)}.shard")

        def undo() -> None:
            shard.unlink(missing_ok=True)

        def complete() -> None:
            for rank, (other, name, length) in enumerate(done):
                if other != step:
                    raise UsageError(f"save_shards: rank {rank} saves step {other}, rank 0 step {step}")
                if not (self.path / name).is_file() or (self.path / name).stat().st_size != length:
                    raise UsageError(f"{self.path}: rank 0 does not see rank {rank}'s shard; all must see one folder")
            names = [name for _, name, _ in done]
            save(self._file(step), {_SHARDS: names})
            self._remove_others(step, names)

        done = _together(lambda: (step, shard.name, _written(shard, part)), undo, process_set)
        _together(lambda: complete() if shard.name == done[0][1] else None, undo, process_set)

    def load(self, step: int) -> dict[str, Any]:
        """The whole state of a step, with all tensors on the CPU, on however many ranks it was saved.

        Raises:
            UsageError: it is missing, incomplete or damaged.
        """
        path = self._file(step)
        state = load(path)
        if _SHARDS not in state:
            return state
        names = state[_SHARDS]
        ours = isinstance(names, list) and all(isinstance(name, str) and _SHARD.fullmatch(name) for name in names)
        if not ours or not names or len(set(names)) < len(names):
            raise UsageError(
                f"{path}: not a checkpoint written by sordino.checkpoint: what names its shards names none"
            )
        parts = []
        for name in names:
            data, source = read(self.path / name), str(self.path / name)
            parts.append(checked(decode(data, source), len(data), source))
        return dict(joined(parts, f"{path}: state"))

    def newest(self) -> Saved | None:
        """The newest checkpoint that is complete and undamaged; None if there is none.

        Of each that is passed over a line on stderr says why. Where ranks see one folder, one of them looks and tells
        the others the step, which they `load`.
        """
        for step in sorted(self.steps(), reverse=True):
            try:
                return Saved(step, self._file(step), self.load(step))
            except UsageError as error:
                print(f"sordino: checkpoint passed over: {error}", file=sys.stderr, flush=True)
        return None

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, whole or not, in ascending order."""
        return sorted(number for path, number in self._files() if path.name == self._file(number).name)

    def _file(self, step: int) -> Path:
        if step < 0:
            raise UsageError(f"step {step}: must be 0 or more")
        return self.path / f"step-{step:08d}.pt"

    def _files(self) -> list[tuple[Path, int]]:
        """What is ours in the folder, with its step."""
        return [(path, int(found[1])) for path in self.path.iterdir() if (found := _NAME.fullmatch(path.name))]

    def _remove_others(self, step: int, shards: Sequence[str]) -> None:
        """All but this checkpoint with its shards, and the `keep - 1` before it."""
        kept = [number for number in self.steps() if number <= step][-self.keep :]

        def stays(path: Path, number: int) -> bool:
            if path.suffix == ".shard" and number == step:
                return path.name in shards  # the others are of an attempt that failed
            return path.suffix != ".tmp" and number in kept

        # What makes a checkpoint of shards goes before them, so that nothing looks complete and is not.
        for path, number in sorted(self._files(), key=lambda file: file[0].suffix != ".pt"):
            if not stays(path, number):
                with contextlib.suppress(OSError):
                    path.unlink()


def _written(path: Path, part: dict[str, Any]) -> int:
    save(path, encoded(part))
    return path.stat().st_size


def _together(action: Callable[[], T], undo: Callable[[], None], process_set: ProcessSet | None) -> list[T]:
    """What `action` returns on each rank. If it fails on one, all know, and all undo what they have done.

    Where a rank is lost nobody undoes anything: some may know already that all went well, and go on.
    """
    # A checkpoint can be read where the core, which `sordino.torch` needs, is not built.
    from sordino.torch.functions import allgather_object
    from sordino.torch.process_sets import global_process_set

    result: T | None = None
    failure: tuple[bool, str] | None = None
    try:
        result = action()
    except SordinoError as error:
        failure = isinstance(error, UsageError), str(error)
    everybody = process_set or global_process_set
    told: list[tuple[T, tuple[bool, str] | None]] = allgather_object((result, failure), process_set=everybody)
    for rank, (_, reason) in enumerate(told):
        if reason is not None:
            undo()
            raise (UsageError if reason[0] else SordinoError)(f"rank {rank}: {reason[1]}")
    return [answer for answer, _ in told]
