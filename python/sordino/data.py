"""Image data sets for the examples, tests and benchmarks, read with numpy and checked byte by byte.

Nothing is downloaded: the digits come with scikit-learn, Fashion-MNIST from files already on the machine
(Debian's `dataset-fashion-mnist`, or any folder with the four original .gz files). A file that is missing,
damaged or different from what its name says raises a `UsageError` with the file, the problem and the fix.
"""

from __future__ import annotations

import gzip
import importlib
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sordino.errors import NotBuilt, UsageError

Bytes = npt.NDArray[np.uint8]

FASHION_MNIST_DIR = Path("/usr/share/datasets/fashion-mnist")
"""Folder in which Debian's package `dataset-fashion-mnist` installs the files."""

_SIDE = 28  # pixels
_MOST = 100_000  # maximum number of images of a part; MNIST and Fashion-MNIST have 60,000
_CHUNK = 1 << 20
_IMAGES = 3  # An IDX file of images has 3 dimensions (count, rows, columns) ...
_LABELS = 1  # ... and one of labels has 1.
_FIX = "install it again with `apt-get install --reinstall dataset-fashion-mnist`, or name a good copy with --data-dir"


@dataclass(frozen=True)
class Dataset:
    """Images in memory, split into a training and a test part.

    Attributes:
        name: `digits` or `fashion-mnist`.
        classes: the number of classes; labels lie in [0, classes).
        train_images: float32 [N, 1, H, W], scaled so that the *training* pixels have mean 0 and deviation 1.
        train_labels: int64 [N].
        test_images: float32 [M, 1, H, W], shifted and scaled by the training part's mean and deviation.
        test_labels: int64 [M].
    """

    name: str
    classes: int
    train_images: npt.NDArray[np.float32]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.float32]
    test_labels: npt.NDArray[np.int64]

    @property
    def image_size(self) -> int:
        """Rows (= columns) of an image."""
        return int(self.train_images.shape[2])


def load_digits() -> Dataset:
    """Load scikit-learn's handwritten digits: 1797 images of 8 x 8 pixels, ten classes.

    Every fifth image of each class is for testing. So the split is the same everywhere, and both parts hold the
    classes in equal shares. It uses no random generator, because its stream may change between versions.

    Raises:
        NotBuilt: scikit-learn is not installed, or its import fails.
    """
    try:
        # Looked up at run time: scikit-learn has no types, and only this function needs it.
        raw = importlib.import_module("sklearn.datasets").load_digits()
    except Exception as error:  # built for another numpy: ValueError; half installed: almost any error
        if isinstance(error, ModuleNotFoundError) and error.name == "sklearn":
            raise NotBuilt("the digits come with scikit-learn, which is missing: pip install scikit-learn") from error
        raise NotBuilt(
            "the digits come with scikit-learn, which is installed but does not work "
            f"({type(error).__name__}: {error}); install it again: pip install --force-reinstall scikit-learn"
        ) from error
    images = np.asarray(raw.images).astype(np.uint8)[:, np.newaxis]
    labels = np.asarray(raw.target).astype(np.int64)
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    return _dataset("digits", images[~is_test], labels[~is_test], images[is_test], labels[is_test])


def load_fashion_mnist(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Load Fashion-MNIST (or MNIST, which has the same format): 60,000 + 10,000 images of 28 x 28, ten classes.

    Args:
        data_dir: a folder with the four `*-ubyte.gz` files; None: `FASHION_MNIST_DIR`.

    Raises:
        UsageError: the folder or a file is missing, or a file is unreadable, not gzip, truncated, too long, or does
            not hold the images or labels that its name promises.
    """
    folder = FASHION_MNIST_DIR if data_dir is None else Path(data_dir)
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: no such folder; Fashion-MNIST comes with `apt-get install dataset-fashion-mnist`, "
            "or name the folder that has its four .gz files with --data-dir"
        )
    train_images, train_labels = _read_part(folder, "train")
    test_images, test_labels = _read_part(folder, "t10k")
    return _dataset("fashion-mnist", train_images, train_labels, test_images, test_labels)


def _read_part(folder: Path, part: str) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Read images uint8 [N, 1, 28, 28] and labels int64 [N] of one part (`train` or `t10k`)."""
    images_path = folder / f"{part}-images-idx3-ubyte.gz"
    labels_path = folder / f"{part}-labels-idx1-ubyte.gz"
    images = _read_idx(images_path, _IMAGES)
    labels = _read_idx(labels_path, _LABELS)
    if len(images) != len(labels):
        raise _damaged(labels_path, f"holds {len(labels)} labels for the {len(images)} images of {images_path.name}")
    if labels.max() > 9:
        raise _damaged(labels_path, f"holds the label {labels.max()}; Fashion-MNIST has the classes 0 to 9")
    return images[:, np.newaxis], labels.astype(np.int64)


def _read_idx(path: Path, dimensions: int) -> Bytes:
    """Read the uint8 array in a gzipped IDX file.

    The file holds a magic number, `dimensions` sizes (big-endian uint32), then the bytes.
    """
    try:
        with gzip.open(path, "rb") as file:
            magic = file.read(4)
            # The third byte is the type (8: uint8), the fourth the number of dimensions.
            if magic != bytes((0, 0, 8, dimensions)):
                contents = "images" if dimensions == _IMAGES else "labels"
                raise _damaged(
                    path, f"starts with the magic number 0x{magic.hex()}, not 0x0000080{dimensions} ({contents})"
                )
            header = file.read(4 * dimensions)
            if len(header) < 4 * dimensions:
                raise _damaged(path, "ends within its header")
            shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4"))
            expected = math.prod(shape)
            # Checked before the data are read: gzip expands one byte to up to a thousand, and a header may promise any
            # number of bytes.
            if expected == 0:
                raise _damaged(path, f"is empty according to its header (sizes {shape})")
            if any(size != _SIDE for size in shape[1:]):
                raise _damaged(path, f"holds images of {shape[1]} x {shape[2]} pixels, not {_SIDE} x {_SIDE}")
            if shape[0] > _MOST:
                raise _damaged(path, f"has {shape[0]:,} entries according to its header; Fashion-MNIST has 60,000")
            # Reads one byte more than expected: gzip verifies its checksum only when it is read to the end.
            payload = bytearray()
            while len(payload) <= expected and (chunk := file.read(min(_CHUNK, expected + 1 - len(payload)))):
                payload += chunk
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; {_FIX}") from error
    except EOFError as error:
        raise _damaged(path, "is truncated: its gzip stream has no end") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, f"is not a sound gzip file ({error})") from error
    except (OSError, OverflowError, MemoryError) as error:
        raise _damaged(path, f"cannot be read ({error})") from error
    if len(payload) < expected:
        raise _damaged(path, f"is truncated: it has {len(payload)} of the {expected} bytes in its header")
    if len(payload) > expected:
        raise _damaged(path, f"is longer than the {expected} bytes in its header")
    return np.frombuffer(payload, dtype=np.uint8).reshape(shape)


def _damaged(path: Path, what: str) -> UsageError:
    return UsageError(f"{path}: {what}; {_FIX}")


def _dataset(
    name: str,
    train_images: Bytes,
    train_labels: npt.NDArray[np.int64],
    test_images: Bytes,
    test_labels: npt.NDArray[np.int64],
) -> Dataset:
    """Normalize the images.

    Pixels are bytes, so a table of 256 floats is enough, and no float64 copy of the images is made.
    """
    counts = np.zeros(256, dtype=np.int64)
    for chunk in np.array_split(train_images, 64):
        counts += np.bincount(chunk.ravel(), minlength=256)
    values = np.arange(256, dtype=np.float64)
    mean = float((values * counts).sum() / counts.sum())
    deviation = math.sqrt(float(((values - mean) ** 2 * counts).sum() / counts.sum()))
    # Equal pixels are legal input. Dividing by their deviation of 0 would spread NaN through the training.
    table = ((values - mean) / (deviation or 1.0)).astype(np.float32)
    return Dataset(name, 10, table[train_images], train_labels, table[test_images], test_labels)
