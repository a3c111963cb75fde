"""Data that Python reads from files and from other ranks: invented, damaged or cut. The result is right, or an error of
Sordino names the problem. Reading takes no more memory than a small multiple of the data, and it ends."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import pickle
import resource
import struct
import tracemalloc
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import report
from claims import claim, running
from drills.course import lines_of
from sordino import algorithms, checkpoint, data, fingerprint
from sordino.checkpoint import Folder, files
from sordino.cli import simulate
from sordino.errors import ConfigurationMismatch, SordinoError, TransportError, UsageError
from sordino.launcher import probe
from sordino.report import records
from sordino.runtime.exchange import async_agent
from sordino.simulate.choices import plan_of
from sordino.simulate.links import Links

MIB = 1 << 20


@contextmanager
def little_memory(more: int) -> Iterator[None]:
    """Check that the peak memory of Python and numpy, and the growth of the process's peak, stay below this limit."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < more, f"{peak >> 20} MiB"
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident)
    assert grown < more + 32 * MIB, f"{grown >> 20} MiB"


# --- Checkpoints ------------------------------------------------------------------------------------------------------

STATE: dict[str, Any] = {
    "model": OrderedDict(weight=torch.arange(12.0).reshape(3, 4), half=torch.ones(2).half()),
    "optimizer": {"state": {0: {"momentum_buffer": torch.full((3,), -0.0), "step": 7}}, "param_groups": [{"lr": 0.1}]},
    "words": ("a", True, None, 1 << 40),
}


def torch_file(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def file_of(state: object) -> bytes:
    return torch_file({"sordino_checkpoint": 1, "state": state})


def rewritten(whole: bytes, change: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return the file with another pickle in it, and with right checksums."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as there, zipfile.ZipFile(out, "w", compression) as here:
        for part in there.infolist():
            content = there.read(part)
            here.writestr(part.filename, change(content) if part.filename.endswith("data.pkl") else content)
    return out.getvalue()


def whole_number_of_bytes(name: bytes) -> bytes:
    """Return a file of a few hundred bytes whose pickle asks for a quarter of a GiB."""
    call = b"c" + name + b"\nbytearray\n(J" + struct.pack("<i", 1 << 28) + b"tR"
    return rewritten(file_of({"x": "AAAA"}), lambda pickled: pickled.replace(b"X\x04\x00\x00\x00AAAA", call))


@cache
def sound() -> bytes:
    return file_of(STATE)


def overlapping() -> bytes:
    """Return an archive with one part under many names."""
    whole = bytearray(sound())
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        begin, count = archive.start_dir, len(archive.infolist())
    end = whole.rindex(b"PK\x05\x06")
    directory = bytes(whole[begin:end])
    times = 60000 // count
    total = struct.pack("<HHII", times * count, times * count, times * len(directory), begin)
    return bytes(whole[:begin]) + times * directory + b"PK\x05\x06" + bytes(4) + total + bytes(2)


def decoded(content: bytes) -> dict[str, Any] | None:
    """Return the state, or None if it is refused properly."""
    try:
        state = checkpoint.decode(content, "the file")
    except UsageError as error:
        assert str(error).startswith("the file: ")
        return None
    assert isinstance(state, dict)
    return state


@st.composite
def mutations(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw a damaged copy: some bytes are changed, missing, repeated or moved."""
    found = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        begin, end = sorted((draw(st.integers(0, len(found))), draw(st.integers(0, len(found)))))
        what = draw(st.sampled_from(["flip", "cut", "end", "repeat", "insert", "number"]))
        if what == "flip" and begin < len(found):
            found[begin] ^= draw(st.integers(1, 255))
        elif what == "cut":
            del found[begin : min(end, begin + 50)]
        elif what == "end":
            del found[end:]
        elif what == "repeat":
            found[begin:begin] = found[begin:end]
        elif what == "insert":
            found[begin:begin] = draw(st.binary(max_size=8))
        elif what == "number":
            found[begin : begin + 4] = draw(st.sampled_from([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4)]))
    return bytes(found)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(max_examples=100)
@given(st.data())
def test_damaged_checkpoints(given_data: st.DataObject) -> None:
    """Checkpoints with wrong checksums, and with right checksums over a damaged pickle."""
    if given_data.draw(st.booleans()):
        content = given_data.draw(mutations(sound()))
    else:
        content = rewritten(sound(), lambda pickled: given_data.draw(mutations(pickled)))
    with little_memory(32 * MIB):
        decoded(content)


LAUGHS: list[Any] = []
for _ in range(50):
    LAUGHS = [LAUGHS, LAUGHS]
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]

# Files that must be refused with a UsageError, by their fault.
MALFORMED = {
    "no state": torch_file({"sordino_checkpoint": 1}),
    "state is no dict": file_of([1, 2]),
    "state is a tensor": file_of(torch.ones(2)),
    "a set": file_of({"x": {1, 2}}),
    "a counter": file_of(Counter("abc")),
    "a size": file_of({"x": torch.Size([1, 2])}),
    "itself": file_of({"x": ITSELF}),
    "deep": file_of({"x": DEEP}),
    "a huge key": file_of({10**5000: {1}}),
    "meta": file_of({"x": torch.ones(2, device="meta")}),
    "bytes of a number": whole_number_of_bytes(b"__builtin__"),
    "bytes of a number, otherwise": whole_number_of_bytes(b"builtins"),
    "compressed": rewritten(file_of({"x": torch.zeros(30 * MIB)}), lambda pickled: pickled, zipfile.ZIP_DEFLATED),
    "overlapping": overlapping(),
    "pickle alone": pickle.dumps({"sordino_checkpoint": 1, "state": {}}),
    "an unhashable format": torch_file({"sordino_checkpoint": [], "state": {}}),
    "a format that is a tensor": torch_file({"sordino_checkpoint": torch.ones(2), "state": {}}),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_checkpoints_are_refused_and_passed_over(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with little_memory(8 * MIB + 8 * len(MALFORMED[what])):
        assert decoded(MALFORMED[what]) is None
    folder = Folder(tmp_path)
    folder.save(1, {"n": 1})
    (tmp_path / "step-00000002.pt").write_bytes(MALFORMED[what])
    found = folder.newest()
    assert found is not None and found.step == 1
    assert "checkpoint skipped" in caplog.text


def test_a_structure_that_unfolds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST", 10_000)
    assert decoded(file_of({"x": LAUGHS})) is None
    assert decoded(file_of({"x": [0] * 9_000})) is not None


def test_wrong_counts_of_elements_are_refused() -> None:
    whole = file_of({"x": torch.arange(300.0)})
    for count in (301, 1 << 30):
        lie = rewritten(whole, lambda pickled: pickled.replace(b"M,\x01", b"J" + struct.pack("<i", count)))  # noqa: B023
        assert decoded(lie) is None


class Marked(torch.Tensor):
    """A class of tensors that no file may name."""


def tagged(tag: object) -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.tag = tag  # type: ignore[attr-defined]
    return tensor


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
tensors = st.sampled_from(
    [
        torch.ones(3),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2).as_subclass(Marked),
        torch.nn.UninitializedParameter(),
        torch.eye(3).to_sparse(),
        torch.ones(1).expand(1 << 40),
        torch.ones(2, device="meta"),
        tagged("word"),
        tagged(Marked),
        tagged([{1}]),
    ]
)
others = st.sampled_from([{1}, b"x", np.float32(1), object(), torch.float32, ITSELF])
trees = st.recursive(
    scalars | tensors | others,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(scalars, inner, max_size=3)
        | st.dictionaries(scalars, inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=6,
)


def like(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype and a.layout == b.layout
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(like(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(like, a, b))
    return type(a) is type(b) and bool(a == b)


@settings(max_examples=60)
@given(state=st.dictionaries(scalars, trees, max_size=3))
@example(state={"x": torch.ones(2).as_subclass(Marked)})
@example(state={"x": tagged(Marked)})
@example(state={"x": torch.nn.UninitializedParameter()})
@example(state={"x": ITSELF})
def test_what_is_saved_can_be_loaded(tmp_path: Path, state: dict[Any, Any]) -> None:
    path = tmp_path / "c.pt"
    path.unlink(missing_ok=True)
    try:
        checkpoint.save(path, state)
    except UsageError:
        assert not path.exists()
    else:
        assert like(checkpoint.load(path), state)


@pytest.mark.parametrize("state", [{10**5000: 1}, {"x": -(10**5000)}], ids=["key", "value"])
def test_a_number_with_more_digits_than_can_be_read_again(tmp_path: Path, state: dict[Any, Any]) -> None:
    with pytest.raises(UsageError, match="has 16,610 bits, but only 2,000 can be read again"):
        checkpoint.save(tmp_path / "c.pt", state)
    checkpoint.save(tmp_path / "c.pt", {"x": -(1 << 1999)})
    assert checkpoint.load(tmp_path / "c.pt") == {"x": -(1 << 1999)}


def piece(*values: float, begin: Any = 0, shape: Any = (4,)) -> dict[str, Any]:
    return {"sordino_piece": torch.tensor(values), "begin": begin, "shape": list(shape)}


def with_values(values: object, shape: Any = (4,)) -> dict[str, Any]:
    return {"sordino_piece": values, "begin": 0, "shape": list(shape)}


pieces = st.one_of(
    st.builds(
        lambda values, begin, shape: piece(*values, begin=begin, shape=shape),
        st.lists(st.just(1.0), max_size=4),
        st.integers(-1, 4) | st.sampled_from([1 << 62, 1 << 70, None, "0", True]),
        st.lists(st.integers(-1, 4) | st.sampled_from([1 << 40, 1 << 63, None, 1.5]), max_size=3),
    ),
    st.builds(with_values, scalars | tensors),
    st.just({"sordino_piece": torch.ones(1)}),
)
whole_trees = scalars | tensors.filter(lambda tensor: type(tensor) is torch.Tensor and tensor.device.type == "cpu")
shards = st.dictionaries(st.sampled_from("ab"), pieces | whole_trees | st.lists(pieces | whole_trees, max_size=2))
shard_names = st.lists(st.sampled_from(["0", "1", "1", "\0", "../x", "", "long", 7, None]), max_size=3)


def folder_of(tmp_path: Path, parts: list[Any], named: object = None) -> Folder:
    """Return a folder with a checkpoint of step 1, and one of step 2 in these shards."""
    folder = Folder(tmp_path)
    folder.save(1, {"n": 1})
    known = {str(number): f"step-00000002.{number:016x}.shard" for number in range(len(parts))}
    for name, part in zip(known.values(), parts):
        (tmp_path / name).write_bytes(file_of(part))
    if isinstance(named, list):
        named = [known.get(name, name) if isinstance(name, str) else name for name in named]
    (tmp_path / "step-00000002.pt").write_bytes(
        file_of({"sordino_shards": list(known.values()) if named is None else named})
    )
    return folder


@settings(max_examples=60)
@given(parts=st.lists(shards, min_size=1, max_size=2), named=st.none() | shard_names | scalars)
@example(parts=[{}], named=[])
@example(parts=[{}], named=7)
@example(parts=[{}], named=["\0"])
@example(parts=[{"a": piece(1.0, shape=(1 << 40,))}], named=None)
@example(parts=[{"a": {**piece(1.0, shape=(1 << 62, 8, 0)), "sordino_piece": torch.ones(0)}}], named=None)
@example(parts=[{"a": piece(1.0)}, {"a": {}}], named=None)
@example(parts=[{"a": {"sordino_piece": torch.ones(1)}}], named=None)
@example(parts=[{"a": with_values(7)}], named=None)
@example(parts=[{"a": with_values(torch.ones(1).expand(1 << 40), shape=(1 << 40,))}], named=None)
@example(parts=[{"a": torch.eye(3).to_sparse()}] * 2, named=None)
@example(parts=[{"a": torch.ones(1).expand(1 << 40)}] * 2, named=None)
@example(parts=[{"a": torch.ones(2).as_strided((1 << 20, 1 << 20), (0, 0))}, {"a": torch.ones(2)}], named=None)
def test_shards_that_make_no_whole(tmp_path: Path, parts: list[Any], named: object) -> None:
    for left in tmp_path.iterdir():
        left.unlink()
    folder = folder_of(tmp_path, parts, named)
    with little_memory(16 * MIB):
        try:
            state = folder.load(2)
        except UsageError as error:
            assert str(tmp_path) in str(error)
            state = None
        found = folder.newest()
    assert found is not None and found.step == (1 if state is None else 2)


# --- Images and labels ------------------------------------------------------------------------------------------------

NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
sizes = st.integers(0, 3) | st.sampled_from([28, 20, 256, 1 << 16, 1 << 31, (1 << 32) - 1])


def idx(shape: list[int], content: bytes) -> bytes:
    return struct.pack(f">I{len(shape)}I", 0x800 + len(shape), *shape) + content


@cache
def images() -> dict[str, bytes]:
    """Return a valid data set of 3 + 3 images."""
    contents = (idx([3, 28, 28], bytes(range(196)) * 12), idx([3], b"\1\2\3")) * 2
    return dict(zip(NAMES, map(gzip.compress, contents)))


def read_images(folder: Path, **contents: bytes) -> data.Dataset | None:
    for name, content in {**images(), **contents}.items():
        (folder / name).write_bytes(content)
    try:
        found = data.load_fashion_mnist(folder)
    except UsageError as error:
        assert str(folder) in str(error)
        return None
    assert found.train_images.shape == (len(found.train_labels), 1, 28, 28) and np.isfinite(found.train_images).all()
    return found


@settings(max_examples=100)
@given(
    name=st.sampled_from(NAMES),
    shape=st.lists(sizes, min_size=1, max_size=3),
    fill=st.integers(0, 4 << 10),
    given_data=st.data(),
)
def test_idx_files(tmp_path: Path, name: str, shape: list[int], fill: int, given_data: st.DataObject) -> None:
    content = gzip.compress(idx(shape, bytes(fill)), 1)
    if given_data.draw(st.booleans()):
        content = given_data.draw(mutations(content))
    with little_memory(16 * MIB):
        read_images(tmp_path, **{name: content})


@pytest.mark.parametrize(
    "shape",
    [[1, 1 << 14, 1 << 14], [1 << 18, 28, 28], [(1 << 32) - 1, 28, 28], [1 << 18]],
    ids=["not 28 x 28", "more than there is", "absurd", "labels"],
)
def test_a_header_is_not_believed_before_it_is_checked(tmp_path: Path, shape: list[int]) -> None:
    """The file decompresses to 96 MiB."""
    content = gzip.compress(idx(shape, bytes(3 * 784)), 1) + 96 * gzip.compress(bytes(MIB), 1)
    with little_memory(16 * MIB):
        assert read_images(tmp_path, **{NAMES[len(shape) == 1]: content}) is None


# --- Links and options of `sordino simulate` --------------------------------------------------------------------------

numbers = st.sampled_from(
    [0, -1, 1, 5, 1e-320, 1e-9, 1e308, 10**400, float("nan"), float("inf"), True, None, "1", [], {}]
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
links_files = st.one_of(
    st.fixed_dictionaries({"gbps": st.lists(numbers, max_size=3), "latency_ms": numbers})
    .map(json.dumps)
    .map(str.encode),
    values.map(json.dumps).map(str.encode),
    st.binary(max_size=20),
)


@given(content=links_files)
@example(content=b'{"gbps": [1, 1' + b"0" * 400 + b'], "latency_ms": 5}')
@example(content=b'{"gbps": [1, 1], "latency_ms": 1' + b"0" * 400 + b"}")
@example(content=b'{"gbps": [1, 1], "latency_ms": 1e308}')
@example(content=b'{"gbps": [1, 1e-320], "latency_ms": 5}')
@example(content=b"[" * 100_000)
@example(content=b'{"gbps": ' + b"1" * 5000 + b"}")
def test_links_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "links.json"
    path.write_bytes(content)
    try:
        found = Links.read(path, 2)
    except UsageError as error:
        assert str(path) in str(error)
    else:
        assert len(found) == 2 and 0 <= found.seconds(0, 1, 1e9) < float("inf")


SETTINGS = sorted({one.name for name in algorithms.names() for one in fields(type(algorithms.resolve(name)))})
words = st.sampled_from(
    [
        *("0", "1", "-1", "3", "1e400", "nan", "None", "True", "(1,2)", "[1]", "{[]:1}", "((1.0,2.0),(3.0,4.0))"),
        *("9" * 5000, "(" * 300, "", "x", "blocks", "decay", "sharded", "leader", "rank", "{1:2}", "1e-320", "1j"),
    ]
)
amounts = st.sampled_from(["0", "1", "-1", "1e-320", "1e308", "nan", "inf", "1e-9", "1e9", "0.5", "5", "7000000000"])
counts = st.sampled_from(["0", "1", "2", "4", "8", "-5", "1000001", "9999999999"])
real = ["seconds", "lr", "momentum", "narrow-gbps", "wide-gbps", "latency-ms", "message-mib", "compute-ms", "load-ms"]
whole = ["workers", "steps", "batch", "seed", "wide", "points", "processes", "images", "channels"]
options = st.one_of(
    st.builds("--{}={}".format, st.sampled_from(real), amounts),
    st.builds("--{}={}".format, st.sampled_from(whole), counts),
    st.builds("--slow={}:{}".format, counts, amounts),
    st.builds("--kill={}@{}".format, counts, amounts),
    st.builds("--set={}={}".format, st.sampled_from(SETTINGS), words),
)


@settings(max_examples=80)
@given(name=st.sampled_from(algorithms.names()), said=st.lists(options, max_size=4))
@example(name="allreduce", said=["--workers=9999999999"])
@example(name="allreduce", said=["--seeds=9999999999"])
@example(name="allreduce", said=["--latency-ms=1e308"])
@example(name="allreduce", said=["--compute-ms=1e-320"])
@example(name="allreduce", said=["--slow=0:1e308"])
@example(name="allreduce", said=["--kill=0@1e308"])
@example(name="allreduce", said=["--narrow-gbps=1e-320"])
@example(name="allreduce", said=["--message-mib=1e308"])
@example(name="local-sgd", said=["--set=interval={[]:1}"])
@example(name="local-sgd", said=["--set=interval=" + "(" * 100_000])
def test_options_of_simulate(name: str, said: list[str]) -> None:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    chosen = parser.parse_args(["--algorithm", name, "--data", "none", *said])
    with little_memory(256 * MIB):
        try:
            plan = plan_of(chosen)
        except SordinoError as error:
            assert str(error)
        else:
            for run in plan.runs:
                seconds = run.job.links.seconds(0, len(run.job.links) - 1, run.job.message_bytes)
                assert 0 <= seconds < float("inf") and (run.job.compute > 0).all()


# --- Data of other ranks ----------------------------------------------------------------------------------------------

texts = values.map(json.dumps) | st.text(max_size=20) | st.sampled_from(["[" * 100_000, "9" * 5000, '"\\ud800"', "NaN"])


@given(text=texts)
@example(text="[" * 100_000)
@example(text='{"a": 1}')
def test_cards(text: str) -> None:
    try:
        card = fingerprint.decode(text, 3)
    except TransportError as error:
        assert "rank 3" in str(error) and len(str(error)) < 300
        return
    assert fingerprint.decode(fingerprint.encode(card), 3) == card
    try:
        fingerprint.compare([0, 3], [{"Sordino": "Sordino 1"}, card])
    except ConfigurationMismatch as error:
        assert str(error)
    else:
        assert card == {"Sordino": "Sordino 1"}


@given(text=texts)
@example(text="5")
@example(text="{}")
@example(text='{"pull": 1}')
@example(text='"a"')
@example(text='["pull", true]')
@example(text="[" * 100_000)
def test_messages(text: str) -> None:
    try:
        message = async_agent.decode(text)
    except TransportError:
        return
    assert isinstance(json.loads(text), list) and isinstance(message[0], str)
    assert all(type(number) in (int, float) for number in message[1:])


# --- Results ----------------------------------------------------------------------------------------------------------

KINDS = sorted(report.REPORTS)


@given(
    kind=st.sampled_from(KINDS) | values,
    rest=st.dictionaries(st.sampled_from(["rows", "ranks", "machine", "name"]), values),
)
@example(kind=["collectives"], rest={})
@example(kind="collectives", rest={})
@example(kind="fusion", rest={"machine": {}, "ranks": 1, "rows": [1]})
def test_reports_of_incomplete_results(tmp_path: Path, kind: object, rest: dict[str, Any]) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"benchmark": kind, **rest}))
    with pytest.raises(UsageError, match=r"results\.json"):
        records.render(path, report.REPORTS)
    assert not path.with_suffix(".md").exists()


@given(content=st.binary(max_size=20) | values.map(json.dumps).map(str.encode))
@example(content=b"[]")
@example(content=b"{}")
@example(content=b'{"task": {}}')
@example(content=b"[" * 100_000)
@example(content=b"\xff")
def test_what_earlier_runs_left(tmp_path: Path, content: bytes) -> None:
    run = claim.Run("work", {})
    kept = tmp_path / f"{run.key}.json"
    kept.write_bytes(content)
    assert running.Runner(tmp_path, ProcessPoolExecutor(1))._read(run.key) is None
    lines, torn = lines_of(kept)
    assert not lines and torn == len(content.decode(errors="replace").splitlines())


@pytest.mark.parametrize("printed", ["5", "[]", "null", "[" * 100_000])
def test_a_probe_that_prints_something_else(printed: str) -> None:
    found, wrong = probe.ask_python(f"print({printed!r})")
    assert found == {} and wrong
