"""Folder of checkpoints, one per step. The newest complete one is found, whatever files a crash has left.

  step-00000120.pt             makes the checkpoint: the state, or the names of its shards. Written last, by a rename.
  step-00000120.<hex>.shard    one rank's part of the state. The name is random, so a shard of a failed attempt is never
                               taken for one of another attempt.
  *.tmp                        a file that is being written

`save_shards` has four steps. After an error in step 2 or 4 every rank removes its shard and raises.

  1. every rank writes its shard
  2. all ranks exchange step, name, length and summary of their shards, or an error; if the summaries do not show that
     the shards form a complete state, also their outlines
  3. the first rank checks that it sees all shards and that they form a complete state, writes the .pt file and removes
     old checkpoints
  4. all ranks exchange whether that succeeded

A checkpoint that can be read but is incomplete is skipped. A checkpoint that cannot be read may be complete, so it is
an error.
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
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sordino.checkpoint.files import check, decode, load, read, save, shown
from sordino.checkpoint.pieces import Piece, Summary, checked, encoded, joined, make_a_whole, outline, summary
from sordino.errors import PeerLost, SordinoError, Unreadable, Unwritable, UsageError
from sordino.files import checked_path, remove_leftover
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
    """Complete checkpoint of a folder: its step, its file, and its state."""

    step: int
    path: Path
    state: dict[str, Any]


class Folder:
    """Folder of checkpoints. It is created if it does not exist.

    Args:
        path: path of the folder, whose parent must exist. For `save_shards` all ranks must see the same folder.
        keep: number of checkpoints to keep: the one saved last, and the `keep - 1` of the steps before it. Older ones
            are removed once it is complete. Checkpoints of later steps stay as well, and do not count.

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
            raise UsageError(f"{path}: the folder cannot be created ({error.strerror})") from error

    def save(self, step: int, state: dict[str, Any], *, drop_newer: bool = False) -> None:
        """Write the checkpoint of a step. Called by one rank.

        Args:
            step: number of the step, 0 or more.
            state: as in `sordino.checkpoint.save`.
            drop_newer: whether to remove the checkpoints of later steps once this one is complete, because training has
                gone back and abandons them. Otherwise they stay until training has passed them, and `newest` finds
                them.

        Raises:
            UsageError, Unwritable: as in `sordino.checkpoint.save`. Earlier checkpoints are unchanged.
        """
        path = self._file(step)
        _require_bool(drop_newer)
        if isinstance(state, dict) and _SHARDS in state:
            raise UsageError(f"state has the key {_SHARDS!r}, which names the shards of a checkpoint; rename it")
        save(path, state)
        self._remove_others(int(step), (), drop_newer)

    def save_shards(
        self, step: int, part: dict[str, Any], process_set: ProcessSet | None = None, *, drop_newer: bool = False
    ) -> None:
        """Write the checkpoint of a step, of which each rank has a part. Collective over the process set (all ranks).

        The checkpoint is complete when this returns. If a rank fails meanwhile, it does not exist. If a rank dies, this
        raises PeerLost, unless the checkpoint was complete before.

        Args:
            step: number of the step, the same on all ranks.
            part: as in `save`, but tensors may be `Piece`s. `share` makes a part of a state that all ranks have. A
                value that is not a piece must be the same in all parts that have it.
            process_set: the ranks that take part.
            drop_newer: as in `save`. The value on the first rank counts.

        Raises:
            UsageError: on all ranks, if the parts do not form a complete state. Earlier checkpoints are unchanged.
            Unwritable: on all ranks, if one of them cannot write. Earlier checkpoints are unchanged.
            PeerLost: a rank is lost. With `on_peer_lost="continue"` all remaining ranks raise it.
        """
        suffix = f".{secrets.token_hex(8)}.shard"
        written: list[Path] = []
        plain: dict[str, Any] = {}

        def write() -> tuple[int, str, int, Summary]:
            shard = self._file(step).with_suffix(suffix)
            _require_bool(drop_newer)
            written.append(shard)
            plain.update(_encoded(part))
            save(shard, plain)
            return int(step), shard.name, shard.stat().st_size, summary(plain)

        def undo() -> None:
            for shard in written:
                with contextlib.suppress(OSError):  # all ranks must learn of the original error
                    shard.unlink(missing_ok=True)

        def complete() -> bool:
            if written[0].name != done[0][1]:
                return False
            for rank, (other, name, length, _) in enumerate(done):
                if other != step:
                    raise UsageError(f"save_shards: rank {rank} saves step {other}, but rank 0 saves step {step}")
                if not (self.path / name).is_file() or (self.path / name).stat().st_size != length:
                    raise UsageError(f"{self.path}: rank 0 cannot see the shard of rank {rank}; use a shared folder")
            if outlines:
                _check_whole(outlines)
            names = [name for _, name, _, _ in done]
            save(self._file(step), {_SHARDS: names})
            self._remove_others(int(step), names, drop_newer)
            return True

        begun_by = len(_members(process_set).ranks or [])
        done = _together(write, undo, process_set, begun_by)
        whole = make_a_whole([one for *_, one in done])
        outlines = [] if whole else _together(lambda: outline(plain), undo, process_set, begun_by)
        if not any(_together(complete, undo, process_set)):  # it may be complete, so the shards stay
            raise PeerLost(f"the rank that completes the checkpoint of step {step} is lost")

    def load(self, step: int) -> dict[str, Any]:
        """Return the complete state of a step, with all tensors on the CPU, for any number of ranks that saved it.

        Raises:
            UsageError: the checkpoint is missing, unreadable, incomplete or damaged.
        """
        path = self._file(step)
        state = load(path)
        if _SHARDS not in state:
            return state
        names = state[_SHARDS]
        ours = isinstance(names, list) and all(isinstance(name, str) and _SHARD.fullmatch(name) for name in names)
        if not ours or not names or len(set(names)) < len(names):
            raise UsageError(f"{path}: not a checkpoint written by sordino.checkpoint: its list of shards is invalid")
        parts = []
        for name in names:
            data, source = read(self.path / name), str(self.path / name)
            parts.append(checked(decode(data, source), len(data), source))
        return dict(joined(parts, f"{path}: state"))

    def newest(self) -> Saved | None:
        """Return the newest complete and undamaged checkpoint, or None.

        A line on stderr gives the reason for each checkpoint that is skipped, and another says if all were. If ranks
        share the folder, one of them calls this and sends the step to the others, which `load` it.

        Raises:
            UsageError: the folder, or a checkpoint that would be the newest, cannot be read (no permission, failing
                disk). It may be complete. If it were skipped, training would replace it by what it saves next.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return Saved(step, self._file(step), self.load(step))
            except Unreadable as error:
                raise UsageError(
                    f"{error}. It may be complete, so no earlier checkpoint is used instead: fix that, or move it away"
                ) from error
            except UsageError as error:
                _log.warning("checkpoint skipped: %s", error)
        if steps:
            text = "%s: no checkpoint to continue from, because all %d are incomplete or damaged"
            _log.error(text, self.path, len(steps))
        return None

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that exist, complete or not, in ascending order."""
        return sorted(number for path, number in self._files() if path.name == self._file(number).name)

    def _file(self, step: int) -> Path:
        if not _is_whole(step) or not 0 <= step <= _LAST_STEP:
            raise UsageError(f"step {shown(step)}: must be a whole number, 0 or more")
        return self.path / f"step-{int(step):08d}.pt"

    def _files(self) -> list[tuple[Path, int]]:
        """Return the files in the folder that belong to checkpoints, with their steps."""
        try:
            paths = list(self.path.iterdir())
        except OSError as error:
            raise UsageError(f"{self.path}: the folder cannot be read ({error.strerror})") from error
        return [(path, int(found[1])) for path in paths if (found := _NAME.fullmatch(path.name))]

    def _remove_others(self, step: int, shards: Sequence[str], drop_newer: bool) -> None:
        """Remove other checkpoints, except the `keep - 1` before this one and, unless `drop_newer`, later ones."""
        kept = [number for number in self.steps() if number <= step][-self.keep :]

        def stays(path: Path, number: int) -> bool:
            if path.suffix == ".shard" and number == step:
                return path.name in shards  # other shards of this step are from a failed attempt
            if path.suffix == ".tmp":
                return False
            return number in kept or (number > step and not drop_newer)

        # A .pt file is removed before its shards, so that no checkpoint looks complete and is not.
        for path, number in sorted(self._files(), key=lambda file: file[0].suffix != ".pt"):
            if not stays(path, number):
                with contextlib.suppress(OSError):
                    if path.suffix == ".tmp":
                        remove_leftover(path)
                    else:
                        path.unlink()


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _require_bool(drop_newer: object) -> None:
    if not isinstance(drop_newer, bool):
        raise UsageError(f"drop_newer={drop_newer!r}: must be True or False")


def _encoded(part: dict[str, Any]) -> dict[str, Any]:
    check(part, besides=(Piece,))  # before other code walks through it: it may contain itself
    return cast("dict[str, Any]", encoded(part))


def _check_whole(outlines: Sequence[dict[str, Any]]) -> None:
    """Raise UsageError if parts with these outlines do not form a complete state."""
    try:
        joined(outlines, "state")
    except UsageError as error:
        raise UsageError(
            f"save_shards: {error}, so the checkpoint could not be loaded. Give share() the rank and the number of "
            "ranks, and put values of a single rank in a dict under the key 'by_rank', by the rank's number"
        ) from error


def _members(process_set: ProcessSet | None) -> ProcessSet:
    # Imported here, because checkpoints can be read where the core, which `sordino.torch` needs, is not built.
    from sordino.runtime.process_set import global_process_set

    return process_set or global_process_set


def _together(
    action: Callable[[], T], undo: Callable[[], None], process_set: ProcessSet | None, begun_by: int = 0
) -> list[T]:
    """Return the results of `action` on all ranks. If it fails on one rank, all ranks call `undo` and raise.

    The error is an Unwritable or a UsageError that names the first rank on which it failed. But a rank on which
    `action` raised anything else than a SordinoError or OSError raises that.

    Where a loss ends the world, a rank that hears of it undoes nothing, because some ranks may know already that
    `action` succeeded on all ranks, and have continued. Where ranks survive losses, all remaining ones see the same
    results. Then fewer results than ranks that have begun mean that all call `undo` and raise PeerLost.

    Args:
        action: what each rank does.
        undo: called if it fails.
        process_set: the ranks; None: all.
        begun_by: number of ranks at the beginning. Some ranks may have recovered from a loss before they counted, so
            the largest number of any rank is decisive. 0: a loss does not matter.
    """
    from sordino.torch.functions import allgather_object

    result: T | None = None
    failure: tuple[bool, str] | None = None
    other: Exception | None = None  # such as MemoryError
    try:
        result = action()
    except (SordinoError, OSError) as error:
        failure = isinstance(error, UsageError), str(error)
    except Exception as error:
        other, failure = error, (False, f"{type(error).__name__}: {error}")
    said = (result, failure, begun_by)
    gathered: list[tuple[T, tuple[bool, str] | None, int]] = allgather_object(said, process_set=_members(process_set))
    for rank, (_, reason, _) in enumerate(gathered):
        if reason is not None:
            undo()
            if other is not None:
                raise other
            raise (UsageError if reason[0] else Unwritable)(f"rank {rank}: {reason[1]}")
    if len(gathered) < max(count for *_, count in gathered):
        undo()
        raise PeerLost("a rank was lost before its part of the checkpoint was complete")
    return [answer for answer, *_ in gathered]
