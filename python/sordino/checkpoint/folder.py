"""A folder of checkpoints, one a step: the newest complete one is found, whatever a crash has left beside it.

`step-00000120.pt` is a checkpoint if and only if it is there and whole. It holds the state, or the names of the shards
that do, and is written last, by a rename. Shards have random names, so one of an attempt that failed is never taken for
one of another. What can be read and is not whole is passed over; what cannot be read may be whole, and is not.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sordino.checkpoint.files import check, decode, load, read, save, shown
from sordino.checkpoint.pieces import Piece, checked, encoded, joined
from sordino.errors import SordinoError, Unreadable, UsageError
from sordino.files import checked_path
from sordino.log import logger

if TYPE_CHECKING:
    from sordino.runtime.process_set import ProcessSet

T = TypeVar("T")
_log = logger(__name__)
_NAME = re.compile(r"\.?step-([0-9]{8,})\.(?:pt|[0-9a-f]{16}\.shard)(?:\.tmp)?")
_SHARD = re.compile(r"step-[0-9]{8,}\.[0-9a-f]{16}\.shard")
_SHARDS = "sordino_shards"
_LAST_STEP = (1 << 63) - 1


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
        keep: how many checkpoints stay: the one that has been saved last, and those of the steps before it. Older ones
            are removed when it is complete. Those of later steps stay as well, and do not count.

    Raises:
        UsageError: `keep` is not 1 or more, or the folder cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        if not _is_whole(keep) or keep < 1:
            raise UsageError(f"Folder(keep={keep!r}): must be a whole number, 1 or more")
        self.path, self.keep = checked_path(path), int(keep)
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path}: the folder cannot be made ({error.strerror})") from error

    def save(self, step: int, state: dict[str, Any], *, drop_newer: bool = False) -> None:
        """Write the checkpoint of a step. One rank calls it.

        Args:
            step: its number, 0 or more.
            state: as of `sordino.checkpoint.save`.
            drop_newer: removes the checkpoints of later steps, once this one is complete: training has gone back, and
                they are of a course that it gives up. Else they stay until it has passed them, and `newest` finds them.

        Raises:
            UsageError, SordinoError: as `sordino.checkpoint.save`; what was there before still is.
        """
        path = self._file(step)
        _require_bool(drop_newer)
        if isinstance(state, dict) and _SHARDS in state:
            raise UsageError(f"state has the key {_SHARDS!r}, by which a checkpoint names its shards; rename it")
        save(path, state)
        self._remove_others(int(step), (), drop_newer)

    def save_shards(
        self, step: int, part: dict[str, Any], process_set: ProcessSet | None = None, *, drop_newer: bool = False
    ) -> None:
        """Write the checkpoint of a step, of which each rank has a part. Collective over the process set (all ranks).

        It is complete when this returns. If a rank dies or fails meanwhile, it is not there.

        Args:
            step: its number, the same on all ranks.
            part: as of `save`, but tensors may be `Piece`s. `share` makes one from a state that all ranks have.
            process_set: the ranks that take part.
            drop_newer: as of `save`; the first rank's counts.

        Raises:
            SordinoError: on all ranks, if one of them cannot write; what was there before still is.
            PeerLost: a rank is gone.
        """
        suffix = f".{secrets.token_hex(8)}.shard"
        written: list[Path] = []

        def write() -> tuple[int, str, int]:
            shard = self._file(step).with_suffix(suffix)
            _require_bool(drop_newer)
            written.append(shard)
            return int(step), shard.name, _written(shard, part)

        def undo() -> None:
            for shard in written:
                with contextlib.suppress(OSError):  # what failed is what all shall hear of
                    shard.unlink(missing_ok=True)

        def complete() -> None:
            for rank, (other, name, length) in enumerate(done):
                if other != step:
                    raise UsageError(f"save_shards: rank {rank} saves step {other}, rank 0 step {step}")
                if not (self.path / name).is_file() or (self.path / name).stat().st_size != length:
                    raise UsageError(f"{self.path}: rank 0 does not see rank {rank}'s shard; all must see one folder")
            names = [name for _, name, _ in done]
            save(self._file(step), {_SHARDS: names})
            self._remove_others(int(step), names, drop_newer)

        done = _together(write, undo, process_set)
        _together(lambda: complete() if written[0].name == done[0][1] else None, undo, process_set)

    def load(self, step: int) -> dict[str, Any]:
        """Return the whole state of a step, with all tensors on the CPU, on however many ranks it was saved.

        Raises:
            UsageError: it is missing, unreadable, incomplete or damaged.
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
        """Return the newest checkpoint that is complete and undamaged; None if there is none.

        Of each that is passed over a line on stderr says why; one more says if that were all. Where ranks see one
        folder, one of them looks and tells the others the step, which they `load`.

        Raises:
            UsageError: the folder, or one that would be the newest, cannot be read (no permission, a disk that fails).
                It may be whole; were it passed over, what training then saves would replace it.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return Saved(step, self._file(step), self.load(step))
            except Unreadable as error:
                raise UsageError(
                    f"{error}; it may be whole, so no earlier one is taken in its place: mend that, or move it away"
                ) from error
            except UsageError as error:
                _log.warning("checkpoint passed over: %s", error)
        if steps:
            text = "%s: none of the %d checkpoints there is whole, so there is nothing to go on from"
            _log.error(text, self.path, len(steps))
        return None

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are there, whole or not, in ascending order."""
        return sorted(number for path, number in self._files() if path.name == self._file(number).name)

    def _file(self, step: int) -> Path:
        if not _is_whole(step) or not 0 <= step <= _LAST_STEP:
            raise UsageError(f"step {shown(step)}: must be a whole number, 0 or more")
        return self.path / f"step-{int(step):08d}.pt"

    def _files(self) -> list[tuple[Path, int]]:
        """Return what is ours in the folder, with its step."""
        try:
            paths = list(self.path.iterdir())
        except OSError as error:
            raise UsageError(f"{self.path}: the folder cannot be read ({error.strerror})") from error
        return [(path, int(found[1])) for path in paths if (found := _NAME.fullmatch(path.name))]

    def _remove_others(self, step: int, shards: Sequence[str], drop_newer: bool) -> None:
        """Remove all but this checkpoint with its shards, the `keep - 1` before it, and those after it."""
        kept = [number for number in self.steps() if number <= step][-self.keep :]

        def stays(path: Path, number: int) -> bool:
            if path.suffix == ".shard" and number == step:
                return path.name in shards  # the others are of an attempt that failed
            if path.suffix == ".tmp":
                return False
            return number in kept or (number > step and not drop_newer)

        # What makes a checkpoint of shards goes before them, so that nothing looks complete and is not.
        for path, number in sorted(self._files(), key=lambda file: file[0].suffix != ".pt"):
            if not stays(path, number):
                with contextlib.suppress(OSError):
                    path.unlink()


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _require_bool(drop_newer: object) -> None:
    if not isinstance(drop_newer, bool):
        raise UsageError(f"drop_newer={drop_newer!r}: must be True or False")


def _written(path: Path, part: dict[str, Any]) -> int:
    check(part, besides=(Piece,))  # before it is walked through: it may hold itself
    save(path, encoded(part))
    return path.stat().st_size


def _together(action: Callable[[], T], undo: Callable[[], None], process_set: ProcessSet | None) -> list[T]:
    """Return what `action` returns on each rank. If it fails on one, all know, and all undo what they have done.

    Where a rank is lost nobody undoes anything: some may know already that all went well, and go on.
    """
    # A checkpoint can be read where the core, which `sordino.torch` needs, is not built.
    from sordino.runtime.process_set import global_process_set
    from sordino.torch.functions import allgather_object

    result: T | None = None
    failure: tuple[bool, str] | None = None
    try:
        result = action()
    except (SordinoError, OSError) as error:
        failure = isinstance(error, UsageError), str(error)
    everybody = process_set or global_process_set
    told: list[tuple[T, tuple[bool, str] | None]] = allgather_object((result, failure), process_set=everybody)
    for rank, (_, reason) in enumerate(told):
        if reason is not None:
            undo()
            raise (UsageError if reason[0] else SordinoError)(f"rank {rank}: {reason[1]}")
    return [answer for answer, _ in told]
