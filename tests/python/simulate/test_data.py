"""Data sets: their content, and the detection of damaged files."""

from __future__ import annotations

import gzip
import importlib
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sordino.data import FASHION_MNIST_DIR, load_digits, load_fashion_mnist
from sordino.errors import NotBuilt, UsageError

TRAIN_IMAGES = "train-images-idx3-ubyte.gz"
TRAIN_LABELS = "train-labels-idx1-ubyte.gz"
TEST_IMAGES = "t10k-images-idx3-ubyte.gz"
TEST_LABELS = "t10k-labels-idx1-ubyte.gz"
FILES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)


def zipped(content: bytes) -> bytes:
    """Compress like gzip, but without a time stamp, as tests are named after the bytes."""
    return gzip.compress(content, mtime=0)


def idx(*shape: int, magic: int | None = None, data: bytes | None = None) -> bytes:
    """Return an IDX file (not compressed); pixel or label number i is i % 10."""
    if magic is None:
        magic = 0x800 + len(shape)
    if data is None:
        data = bytes(i % 10 for i in range(int(np.prod(shape))))
    return struct.pack(f">I{len(shape)}I", magic, *shape) + data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a valid data set of 20 + 10 images."""
    contents = (idx(20, 28, 28), idx(20), idx(10, 28, 28), idx(10))
    for name, content in zip(FILES, contents):
        (tmp_path / name).write_bytes(zipped(content))
    return tmp_path


def test_digits_are_whole_split_evenly_and_normalised() -> None:
    digits = load_digits()
    assert digits.name == "digits"
    assert digits.classes == 10
    assert digits.image_size == 8
    assert digits.train_images.dtype == np.float32
    assert digits.train_labels.dtype == np.int64
    assert digits.train_images.shape == (len(digits.train_labels), 1, 8, 8)
    assert digits.test_images.shape == (len(digits.test_labels), 1, 8, 8)
    assert len(digits.train_labels) + len(digits.test_labels) == 1797
    assert abs(digits.train_images.mean(dtype=np.float64)) < 1e-6
    assert abs(digits.train_images.std(dtype=np.float64) - 1) < 1e-6
    for label in range(10):
        train, test = (digits.train_labels == label).sum(), (digits.test_labels == label).sum()
        assert test == (train + test) // 5


def test_digits_are_the_same_every_time_and_the_parts_do_not_overlap() -> None:
    first, second = load_digits(), load_digits()
    assert first.test_images.tobytes() == second.test_images.tobytes()
    assert first.train_labels.tobytes() == second.train_labels.tobytes()
    train = {image.tobytes() for image in first.train_images}
    assert not any(image.tobytes() in train for image in first.test_images)


def test_idx_files_become_normalised_images(folder: Path) -> None:
    data = load_fashion_mnist(folder)
    raw = (np.arange(20 * 784) % 10).reshape(20, 1, 28, 28)
    np.testing.assert_allclose(data.train_images, (raw - raw.mean()) / raw.std(), atol=1e-6)
    np.testing.assert_allclose(data.test_images, (raw[:10] - raw.mean()) / raw.std(), atol=1e-6)
    assert data.train_images.dtype == np.float32
    assert data.train_labels.tolist() == [i % 10 for i in range(20)]
    assert data.test_labels.dtype == np.int64
    assert data.image_size == 28


def test_blank_images_give_no_nan(folder: Path) -> None:
    (folder / TRAIN_IMAGES).write_bytes(zipped(idx(20, 28, 28, data=bytes(20 * 784))))
    assert np.isfinite(load_fashion_mnist(folder).train_images).all()


@pytest.mark.extra
@pytest.mark.skipif(not FASHION_MNIST_DIR.is_dir(), reason="needs `apt-get install dataset-fashion-mnist`")
def test_the_real_fashion_mnist() -> None:
    data = load_fashion_mnist()
    assert data.train_images.shape == (60000, 1, 28, 28)
    assert data.test_images.shape == (10000, 1, 28, 28)
    assert np.bincount(data.train_labels).tolist() == [6000] * 10
    assert np.bincount(data.test_labels).tolist() == [1000] * 10
    assert abs(data.train_images.mean(dtype=np.float64)) < 1e-5


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("raise ValueError('numpy.dtype size changed')", r"does not work \(ValueError: numpy.dtype size changed\)"),
        ("import no_such_module_at_all", "does not work .*no_such_module_at_all"),
        ("def load_digits(): raise FileNotFoundError('digits.csv.gz')", "does not work .*digits.csv.gz"),
    ],
)
def test_a_broken_scikit_learn_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, why: str
) -> None:
    (tmp_path / "sklearn" / "datasets").mkdir(parents=True)
    (tmp_path / "sklearn" / "__init__.py").touch()
    (tmp_path / "sklearn" / "datasets" / "__init__.py").write_text(content)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(NotBuilt, match=f"{why}.*; install it again: pip install --force-reinstall scikit-learn"):
            load_digits()
    finally:
        for name in ("sklearn.datasets", "sklearn"):
            sys.modules.pop(name, None)


def test_a_missing_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(NotBuilt, match="scikit-learn, which is missing: pip install scikit-learn"):
        load_digits()


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere: no such folder.*apt-get install dataset-fashion-mnist.*--data-dir"):
        load_fashion_mnist(tmp_path / "nowhere")


@pytest.mark.parametrize("name", FILES)
def test_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UsageError, match=f"{name}: no such file; .*apt-get"):
        load_fashion_mnist(folder)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        (TRAIN_IMAGES, zipped(idx(20)), "magic number 0x00000801, not 0x00000803"),
        (TRAIN_LABELS, zipped(idx(20, 28, 28)), "magic number 0x00000803, not 0x00000801"),
        (TRAIN_LABELS, zipped(idx(20, magic=0xD01)), "magic number 0x00000d01"),
        (TRAIN_LABELS, zipped(b""), "magic number 0x,"),
        (TRAIN_LABELS, b"", "magic number 0x,"),
        (TRAIN_LABELS, zipped(idx(20)[:6]), "ends within its header"),
        (TRAIN_LABELS, zipped(idx(0)), "is empty according to its header"),
        (TRAIN_IMAGES, zipped(idx(20, 0, 28)), "is empty according to its header"),
        (TRAIN_IMAGES, zipped(idx(20, 28, 28)[:-1]), "truncated: it has 15679 of the 15680 bytes"),
        (TRAIN_IMAGES, zipped(idx(20, 28, 28) + b"x"), "longer than the 15680 bytes"),
        (TRAIN_IMAGES, zipped(idx(20, 27, 28)), "27 x 28 pixels"),
        (TRAIN_IMAGES, zipped(idx(2**32 - 1, 2**32 - 1, 2**32 - 1, data=b"")), "4294967295 x 4294967295 pixels"),
        (
            TRAIN_IMAGES,
            zipped(idx(100_001, 28, 28, data=b"")),
            "has 100,001 entries according to its header; Fashion-MNIST has 60,000",
        ),
        (TRAIN_LABELS, zipped(idx(19)), "holds 19 labels for the 20 images"),
        (TRAIN_LABELS, zipped(idx(20, data=bytes([10] * 20))), "label 10"),
        (TEST_LABELS, zipped(idx(11)), "holds 11 labels for the 10 images"),
        (TEST_IMAGES, idx(10, 28, 28), "not a sound gzip file"),
        (TEST_IMAGES, zipped(idx(10, 28, 28))[:-9], "gzip stream has no end"),
        (TEST_IMAGES, zipped(idx(10, 28, 28)) + b"rubbish", "not a sound gzip file"),
    ],
)
def test_damaged_file(folder: Path, name: str, content: bytes, complaint: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(UsageError, match=complaint) as caught:
        load_fashion_mnist(folder)
    assert str(folder / name) in str(caught.value)
    assert "apt-get" in str(caught.value)


def test_unreadable_file(folder: Path) -> None:
    (folder / TRAIN_LABELS).unlink()
    (folder / TRAIN_LABELS).mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        load_fashion_mnist(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_no_flipped_byte_changes_the_data_unnoticed(folder: Path, name: str, where: float, flip: int) -> None:
    path = folder / name
    whole = path.read_bytes()
    sound = load_fashion_mnist(folder)
    damaged = bytearray(whole)
    damaged[int(where * len(whole))] ^= flip
    path.write_bytes(damaged)
    try:
        # Some bytes of gzip's header (time stamp, system) do not affect the data, so the data may still be right.
        read = load_fashion_mnist(folder)
    except UsageError as error:
        assert str(path) in str(error)
    else:
        assert read.train_images.tobytes() == sound.train_images.tobytes()
        assert read.test_images.tobytes() == sound.test_images.tobytes()
        assert read.train_labels.tobytes() == sound.train_labels.tobytes()
        assert read.test_labels.tobytes() == sound.test_labels.tobytes()
    finally:
        path.write_bytes(whole)
