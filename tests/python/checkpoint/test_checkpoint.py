"""Checkpoints: saved state comes back bit for bit; a crash at any moment leaves the old checkpoint or the new one."""

from __future__ import annotations

import errno
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sordino import checkpoint
from sordino.errors import SordinoError, UsageError

STATE: dict[str, Any] = {
    "model": OrderedDict(weight=torch.arange(12.0).reshape(3, 4), empty=torch.zeros(0, 3), half=torch.ones(2).half()),
    "optimizer": {"state": {0: {"momentum_buffer": torch.full((3,), -0.0), "step": 7}}, "param_groups": [{"lr": 0.1}]},
    "words": ("a", True, None, 1 << 40, float("inf")),
}


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        return alike and equal(vars(a), vars(b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def with_attributes(values: dict[str, Any]) -> torch.Tensor:
    """Return a tensor on which a script has set attributes."""
    tensor = torch.zeros(1)
    vars(tensor).update(values)
    return tensor


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    checkpoint.save(path, STATE)
    assert equal(checkpoint.load(path), STATE)
    assert equal(checkpoint.decode(checkpoint.read(path), "here"), STATE)
    assert os.listdir(tmp_path) == ["c.pt"]


def test_optimizer_and_rng_round_trip(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    checkpoint.save(tmp_path / "c.pt", state)
    drawn = torch.rand(5)
    loaded = checkpoint.load(tmp_path / "c.pt")
    assert equal(loaded, state)
    torch.set_rng_state(loaded["rng"])
    assert torch.rand(5).equal(drawn)


def test_states_of_schedulers_and_generators_round_trip(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=np.float64(0.5))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    state = {
        "scheduler": scheduler.state_dict(),
        "python": random.getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "generator": np.random.default_rng(3).bit_generator.state,
        "values": [np.float32(0.1), np.int64(-3), np.bool_(True), np.complex64(1j), np.zeros((0, 2)), np.ones((2, 3))],
        "optimizer": optimizer.state_dict(),
    }
    checkpoint.save(tmp_path / "c.pt", state)
    loaded = checkpoint.load(tmp_path / "c.pt")
    assert type(loaded["scheduler"]["milestones"]) is Counter
    scheduler.load_state_dict(loaded["scheduler"])
    assert sorted(scheduler.milestones.elements()) == [2, 2, 5]
    random.setstate(loaded["python"])
    generator = np.random.default_rng()
    generator.bit_generator.state = loaded["generator"]
    assert generator.random() == np.random.default_rng(3).random()
    old = np.random.RandomState()
    old.set_state(loaded["numpy"])
    assert old.rand() == np.random.RandomState(3).rand()
    for mine, theirs in zip(loaded["values"], state["values"]):
        assert type(mine) is type(theirs) and mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
    assert type(loaded["optimizer"]["param_groups"][0]["lr"]) is np.float64


NUMBERS = st.sampled_from(
    [2, True, 0.5, np.int64(3), np.float32(1.5), np.bool_(False), np.longdouble(2.5), np.complex64(2j), 1 << 80]
)
KEYS = st.one_of(st.text(max_size=2), NUMBERS, st.none(), st.tuples(NUMBERS, st.text(max_size=1)))
PLAIN = st.one_of(NUMBERS, st.just("text"), st.just(torch.ones(2)), st.just(np.arange(3)))
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(KEYS, inner, max_size=2),
        st.dictionaries(KEYS, inner, max_size=2).map(Counter),
        st.dictionaries(st.just("scale"), inner, max_size=1).map(with_attributes),
    ),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=2))
def test_what_is_saved_can_be_loaded(state: dict[Any, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            checkpoint.save(f"{folder}/c.pt", state)
        except UsageError:
            assert os.listdir(folder) == []
        else:
            assert equal(checkpoint.load(f"{folder}/c.pt"), state)


def test_keys_and_counts_of_numpy_round_trip(tmp_path: Path) -> None:
    """Milestones of a scheduler from an array, counts of `np.unique`, and a metric that counts by tensors."""
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.zeros(1)]), np.array([2, 2, 5]))  # type: ignore[arg-type]
    state = {
        "scheduler": scheduler.state_dict(),
        "counts": dict(zip(*np.unique([4, 4, 7], return_counts=True))),
        "metric": Counter({"right": torch.tensor(3), (np.int64(1), 2): np.float32(0.5)}),
    }
    checkpoint.save(tmp_path / "c.pt", state)
    loaded = checkpoint.load(tmp_path / "c.pt")
    scheduler.load_state_dict(loaded["scheduler"])
    assert sorted(scheduler.milestones.elements()) == [2, 2, 5] and loaded["counts"] == {4: 2, 7: 1}
    assert type(loaded["metric"]) is Counter and loaded["metric"] == state["metric"]


@pytest.mark.parametrize(
    "value",
    [
        {"sordino_value": "Counter", "counts": [1]},
        {"sordino_value": "Counter", "counts": {}, "more": 1},
        {"sordino_value": "NumPy", "dtype": "|O", "shape": [1], "bytes": torch.zeros(8, dtype=torch.uint8)},
        {"sordino_value": "NumPy", "dtype": "<f8", "shape": [2], "bytes": torch.zeros(8, dtype=torch.uint8)},
        {"sordino_value": "NumPy", "dtype": "<f8", "shape": [-1], "bytes": torch.zeros(8, dtype=torch.uint8)},
        {"sordino_value": "NumPy", "dtype": "<f99", "shape": [1], "bytes": torch.zeros(8, dtype=torch.uint8)},
        {"sordino_value": "NumPy", "dtype": "<f8", "shape": [1], "bytes": torch.zeros(8)},
        {"sordino_value": 3},
    ],
)
def test_values_that_are_none_are_refused(tmp_path: Path, value: dict[str, Any]) -> None:
    torch.save({"sordino_checkpoint": 2, "state": {"a": value}}, tmp_path / "c.pt")
    with pytest.raises(UsageError, match="not a checkpoint written by"):
        checkpoint.load(tmp_path / "c.pt")


def test_the_file_has_the_usual_permissions(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        checkpoint.save(tmp_path / "c.pt", STATE)
    finally:
        os.umask(old)
    assert (tmp_path / "c.pt").stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "latest.pt").symlink_to("deep/c.pt")
    checkpoint.save(tmp_path / "latest.pt", STATE)
    assert (tmp_path / "latest.pt").is_symlink()
    assert equal(checkpoint.load(tmp_path / "deep" / "c.pt"), STATE)


class Named(torch.Tensor):
    """Tensor class that only its own code could make again."""


ITSELF: dict[str, Any] = {"model": {}}
ITSELF["model"]["again"] = ITSELF


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, {"b": np.str_("c")}]}, r"state\['a'\]\[1\]\['b'\] is a numpy.str_"),
        ({"a": np.array([object()])}, r"state\['a'\] is a numpy.ndarray"),
        ({"a": {"sordino_value": "Counter"}}, "which checkpoints reserve"),
        ({"a": object()}, r"state\['a'\] is a builtins.object"),
        ({"a": with_attributes({"b": np.int64(1)})}, r"state\['a'\].b is a numpy.int64, which an attribute"),
        ({np.complex64(1j): 1}, "a key of state is a numpy.complex64"),
        ({b"key": 1}, r"a key of state is a builtins.bytes"),
        ({"a": {1, 2}}, "builtins.set"),
        ({"a": (torch.ones(2).as_subclass(Named),)}, r"state\['a'\]\[0\] is a .*Named; only a plain torch.T"),
        ({"a": torch.nn.UninitializedParameter()}, r"state\['a'\] is a .*UninitializedParameter; only"),
        ({"a": torch.ones(2, 2).to_mkldnn()}, r"state\['a'\] has the layout torch._mkldnn"),
        (ITSELF, r"state\['model'\]\['again'\] contains itself"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, value: dict[str, Any], where: str) -> None:
    with pytest.raises(UsageError, match=where):
        checkpoint.save(tmp_path / "c.pt", value)
    assert os.listdir(tmp_path) == []


def test_what_is_too_deep_is_not_saved(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UsageError, match=r"state\['a'\](\[0\])+ is in more than 100 containers"):
        checkpoint.save(tmp_path / "c.pt", {"a": deep})


def test_parameters_and_buffers_are_tensors(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(3)
    state = {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        **dict(model.named_buffers()),
        **dict(vars(model))["_parameters"],
    }
    if hasattr(torch.nn, "Buffer"):
        state["buffer"] = torch.nn.Buffer(torch.arange(3.0))
    checkpoint.save(tmp_path / "c.pt", state)
    loaded = checkpoint.load(tmp_path / "c.pt")
    assert loaded.keys() == state.keys()
    assert all(type(loaded[key]) is type(state[key]) and equal(loaded[key].data, state[key].data) for key in state)


def test_what_torch_cannot_write_is_said_in_our_words(tmp_path: Path) -> None:
    with pytest.raises(SordinoError, match=r"c\.pt: the checkpoint cannot be written \(.*uint2"):
        checkpoint.save(tmp_path / "c.pt", {"x": torch.empty(4, dtype=torch.uint2)})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("a\0b", r"'a\\x00b': a path must not contain a NUL character"),
        (None, "must be a str or a pathlib.Path, not a builtins.NoneType"),
        (b"c.pt", "must be a str or a pathlib.Path, not a builtins.bytes"),
    ],
)
def test_what_is_no_path_is_refused(path: Any, why: str) -> None:
    for call in (lambda path: checkpoint.save(path, {}), checkpoint.load, checkpoint.read, checkpoint.Folder):
        with pytest.raises(UsageError, match=why):
            call(path)


def test_an_exception_in_mid_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    checkpoint.save(path, {"n": 1})
    with pytest.raises(KeyboardInterrupt), checkpoint.atomic_file(path) as file:
        file.write(b"half")
        file.flush()
        raise KeyboardInterrupt
    assert checkpoint.load(path) == {"n": 1}
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_full_disk_leaves_the_old_file_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.pt"
    checkpoint.save(path, {"n": 1})
    real_save = torch.save

    def save(content: object, file: BinaryIO) -> None:
        class Full:
            def write(self, data: bytes) -> int:
                if file.tell() > 1000:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return file.write(data)

            def flush(self) -> None:
                file.flush()

        real_save(content, Full())  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(
        SordinoError, match=r"c\.pt: .* cannot be written .*No space left.* earlier checkpoint is unchanged"
    ):
        checkpoint.save(path, {"n": torch.zeros(10000)})
    monkeypatch.undo()
    assert checkpoint.load(path) == {"n": 1}
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SordinoError, match="nowhere"):
        checkpoint.save(tmp_path / "nowhere" / "c.pt", STATE)


def test_two_writers_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    with checkpoint.atomic_file(path) as file:
        file.write(b"first")
        with pytest.raises(UsageError, match="another process is writing"):
            checkpoint.save(path, STATE)
    assert path.read_bytes() == b"first"


WRITER = """
import sys, torch
from sordino import checkpoint
number = 0
while True:
    number += 1
    checkpoint.save(sys.argv[1], {"number": number, "data": torch.full((200_000,), float(number))})
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    generator = random.Random(0)
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout
            first = int(writer.stdout.readline())
            time.sleep(generator.uniform(0, 0.1))
            writer.send_signal(signal.SIGKILL)
            last = [first, *map(int, writer.stdout.read().split())][-1]
        state = checkpoint.load(path)
        assert state["number"] >= last
        assert (state["data"] == state["number"]).all()
        # A killed writer leaves at most one incomplete file, which the next writer takes over.
        assert set(os.listdir(tmp_path)) <= {"c.pt", ".c.pt.tmp"}
    checkpoint.save(path, STATE)
    assert os.listdir(tmp_path) == ["c.pt"]


def test_missing_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such checkpoint"):
        checkpoint.load(tmp_path / "c.pt")
    with pytest.raises(UsageError, match="cannot be read"):
        checkpoint.load(tmp_path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_refused(tmp_path: Path, where: float) -> None:
    path = tmp_path / "c.pt"
    checkpoint.save(path, STATE)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(where * len(whole))])
    with pytest.raises(UsageError, match=r"c\.pt: truncated, damaged, or not a checkpoint"):
        checkpoint.load(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_changes_the_state_unnoticed(tmp_path: Path, where: float, bit: int) -> None:
    path = tmp_path / "c.pt"
    checkpoint.save(path, STATE)
    damaged = bytearray(path.read_bytes())
    damaged[int(where * len(damaged))] ^= 1 << bit
    try:
        # Padding and time stamps do not affect the state, so it may still be right.
        state = checkpoint.decode(bytes(damaged), "here")
    except UsageError as error:
        assert str(error).startswith("here: ")
    else:
        assert equal(state, STATE)


def test_a_part_that_claims_to_be_a_folder_is_refused(tmp_path: Path) -> None:
    """No checksum covers this bit in the directory of the archive. torch would return uninitialized memory."""
    path = tmp_path / "c.pt"
    checkpoint.save(path, STATE)
    whole = path.read_bytes()
    headers = [found.start() for found in re.finditer(rb"PK\x01\x02", whole)]
    assert len(headers) > 3
    for header in headers:
        damaged = bytearray(whole)
        damaged[header + 38] |= 0x10
        with pytest.raises(UsageError, match="claim to be folders"):
            checkpoint.decode(bytes(damaged), "here")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("pwned",))


def test_foreign_files_are_refused_and_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.pt"
    torch.save({"x": Evil()}, path)
    with pytest.raises(UsageError, match="not a checkpoint written by"):
        checkpoint.load(path)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UsageError, match="not a checkpoint"):
        checkpoint.load(path)
    torch.save({"model": torch.zeros(3)}, path)
    with pytest.raises(UsageError, match="a torch file, but not one written by"):
        checkpoint.load(path)
    for version in (torch.ones(2), True, 1.0, "1"):
        torch.save({"sordino_checkpoint": version, "state": {}}, path)
        with pytest.raises(UsageError, match="its format is not a number"):
            checkpoint.load(path)
    torch.save({"sordino_checkpoint": 3, "state": {}}, path)
    with pytest.raises(UsageError, match="format 3; this version of Sordino reads formats up to 2"):
        checkpoint.load(path)
    path.write_text("hello")
    with pytest.raises(UsageError, match="truncated, damaged, or not a checkpoint"):
        checkpoint.load(path)
    assert not (tmp_path / "pwned").exists()
