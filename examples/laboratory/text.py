"""Text of `language.py` as bytes: which files are held out, and which rank reads which part of it.

The training text is divided into sequences. Every step takes a global batch of them, in an order that depends on the
seed only, and each rank takes its part of the batch. So any number of ranks reads the same sequences in the same steps.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laboratory.common import share
from sordino.errors import UsageError

_ONE_IN = 20  # share of the files that are held out
_WITHOUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})  # not in every installation


@dataclass(frozen=True)
class Text:
    """Training text and held-out text: the bytes of files, in the order of their names, with a zero byte after each.

    Attributes:
        train: uint8 [bytes].
        held_out: uint8 [bytes], of other files.
        train_files: names of the files of `train`.
        held_out_files: names of the files of `held_out`.
    """

    train: Tensor
    held_out: Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]

    def sha256(self) -> str:
        """Return a hash of all bytes."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(f"{len(part)}\n".encode() + part.numpy().tobytes())
        return digest.hexdigest()


def is_held_out(name: str) -> bool:
    """Return whether the file is held out for validation: one in twenty, by the hash of its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % _ONE_IN == 0


def load_text(folder: str | None) -> Text:
    """Return the text of all files below a folder, or of the modules of Python's standard library if it is None.

    Hidden files and empty files are left out; of the standard library also its tests, which not every installation has.

    Raises:
        UsageError: there is no such folder, or a file cannot be read, or there are no files to train on or to hold out.
    """
    root = Path(folder) if folder is not None else Path(sysconfig.get_path("stdlib"))
    where = "the standard library" if folder is None else f"--text {folder}"
    if not root.is_dir():
        raise UsageError(f"{where}: there is no folder {root}")
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*" if folder is not None else "*.py"))
    parts: dict[bool, dict[str, bytes]] = {False: {}, True: {}}
    for name in names:
        path, words = root / name, name.split("/")
        if not path.is_file() or any(word.startswith(".") for word in words):
            continue
        if folder is None and not _WITHOUT.isdisjoint(words):
            continue
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
        if content:
            parts[is_held_out(name)][name] = content
    train, held_out = parts[False], parts[True]
    if not train and not held_out:
        raise UsageError(
            f"{where}: no text: every file below this folder is empty or hidden. Name a folder of text files"
        )
    for found, purpose in ((train, "to train on"), (held_out, "to hold out for validation")):
        if not found:
            raise UsageError(
                f"{where}: no file {purpose} among its {len(train) + len(held_out)} files. One in {_ONE_IN} is held "
                "out, by the hash of its name. Cut the text into more files, for example with `split -b 64k`"
            )
    return Text(_joined(train), _joined(held_out), tuple(train), tuple(held_out))


def _joined(contents: dict[str, bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(one + b"\0" for one in contents.values()), np.uint8).copy())


def sequences(text: Tensor, rows: Tensor, context: int) -> Tensor:
    """Return sequences of a text by their numbers, [rows, context + 1] of int64: inputs, and each input's next byte.

    Neighbors have one byte in common, so that each byte but the first is a target once.
    """
    return text[rows[:, None] * context + torch.arange(context + 1)].long()


def count_sequences(text: Tensor, context: int) -> int:
    """Return the number of whole sequences in a text."""
    return (len(text) - 1) // context


class Batches:
    """Global batches of a training text.

    Every epoch is a permutation of all sequences. It is determined by the seed and the number of the epoch. Sequences
    that do not fill a batch are left out of the epoch, so that all steps have equally many tokens.

    Args:
        text: uint8 [bytes].
        context: bytes per sequence.
        batch: sequences per step, of all ranks together.
        seed: seed of the order.

    Raises:
        UsageError: the text has less than one batch.
    """

    def __init__(self, text: Tensor, context: int, batch: int, seed: int) -> None:
        self._text, self._context, self._batch, self._seed = text, context, batch, seed
        count = count_sequences(text, context)
        self._per_epoch = count // batch
        if self._per_epoch == 0:
            raise UsageError(
                f"the training text of {len(text):,} bytes has {count} sequences of --context {context}, which is less "
                f"than --batch {batch}. Use more text, or a smaller batch or context"
            )
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def rows(self, step: int, rank: int, size: int) -> Tensor:
        """Return the numbers of the sequences that rank `rank` of `size` ranks trains on in a step, int64 [rows]."""
        epoch, number = divmod(step, self._per_epoch)
        if epoch != self._epoch:
            order = np.random.Generator(np.random.PCG64((self._seed, epoch)))
            self._order = torch.from_numpy(order.permutation(count_sequences(self._text, self._context)))
            self._epoch = epoch
        return self._order[number * self._batch : (number + 1) * self._batch][share(self._batch, rank, size)]

    def sequences(self, step: int, rank: int, size: int) -> Tensor:
        """Return the same sequences, [rows, context + 1] of int64."""
        return sequences(self._text, self.rows(step, rank, size), self._context)
