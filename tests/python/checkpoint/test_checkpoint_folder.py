"""A folder of checkpoints: the newest complete one is found; shards load correctly on any number of ranks."""

from __future__ import annotations

import fcntl
import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sordino.torch as hvd
from sordino import checkpoint, sim
from sordino.checkpoint import Folder, Piece, atomic_file, folder, pieces
from sordino.checkpoint.pieces import encoded, joined
from sordino.errors import SordinoError, UsageError
from sordino.files import remove_leftover


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def number_of(folder: Folder) -> object:
    found = folder.newest()
    return None if found is None else found.state["number"]


def test_the_newest_is_found_and_older_ones_go(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "saved", keep=2)
    assert folder.newest() is None
    for step in (3, 20, 100):
        folder.save(step, {"number": step})
        found = folder.newest()
        assert found is not None
        assert (found.step, found.state, found.path) == (step, {"number": step}, folder.path / f"step-{step:08d}.pt")
        assert checkpoint.load(found.path) == {"number": step}
    assert folder.steps() == [20, 100]
    assert names(folder.path) == ["step-00000020.pt", "step-00000100.pt"]
    assert folder.load(20) == {"number": 20}
    Folder(folder.path, keep=1).save(101, {"number": 101})
    assert folder.steps() == [101]


def test_a_course_that_goes_back_drops_the_later_one_only_if_asked(tmp_path: Path) -> None:
    folder = Folder(tmp_path, keep=2)
    for step in (20, 30, 40, 15):
        folder.save(step, {"number": step})
    assert folder.steps() == [15, 30, 40] and number_of(folder) == 40
    for step, stay in ((16, [15, 16, 30, 40]), (17, [16, 17, 30, 40]), (30, [17, 30, 40]), (35, [30, 35, 40])):
        folder.save(step, {"number": -step})
        assert folder.steps() == stay and number_of(folder) == 40
    folder.save(33, {"number": -33}, drop_newer=True)
    assert folder.steps() == [30, 33] and number_of(folder) == -33


def test_a_temporary_file_that_takes_the_place_of_another_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer moves its file to the target and ends, and the next writer begins, just before the lock."""
    temporary = tmp_path / ".step-00000001.pt.tmp"
    temporary.write_bytes(b"whole")
    lock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        temporary.replace(tmp_path / "step-00000001.pt")
        temporary.write_bytes(b"next")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    remove_leftover(temporary)
    assert temporary.read_bytes() == b"next"


def test_a_file_that_is_being_written_stays_and_a_leftover_goes(tmp_path: Path) -> None:
    folder = Folder(tmp_path, keep=2)
    leftover = tmp_path / ".step-00000001.pt.tmp"
    leftover.write_bytes(b"half")
    with atomic_file(folder.path / "step-00000002.pt") as slow:  # as by a thread that saves meanwhile
        folder.save(3, {"number": 3})
        torch.save({"sordino_checkpoint": 1, "state": {"number": 2}}, slow)
    assert not leftover.exists()
    assert folder.steps() == [2, 3] and folder.load(2) == {"number": 2}


def test_shards_of_later_steps_stay_too(tmp_path: Path) -> None:
    folder = Folder(tmp_path, keep=1)

    def save() -> None:
        for step in (20, 10):
            folder.save_shards(step, checkpoint.share({"number": step, "x": torch.ones(5)}, hvd.rank(), 2))

    sim.run(2, save)
    assert folder.steps() == [10, 20] and number_of(folder) == 20
    sim.run(2, lambda: folder.save_shards(15, {"number": 15}, drop_newer=True))
    assert folder.steps() == [15] and number_of(folder) == 15 and len(names(tmp_path)) == 3


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "shard"])
@pytest.mark.parametrize(
    ("leads_to", "why"), [("/proc/self/mem", "Input/output error"), ("itself", "Too many levels")], ids=["disk", "link"]
)
def test_what_cannot_be_read_is_not_passed_over(tmp_path: Path, sharded: bool, leads_to: str, why: str) -> None:
    folder = Folder(tmp_path, keep=1)
    folder.save(1, {"number": 1})
    if sharded:
        sim.run(2, lambda: folder.save_shards(2, {"number": 2}))
        (tmp_path / "step-00000001.pt").unlink(missing_ok=True)
    else:
        folder.save(2, {"number": 2})
    folder.save(1, {"number": 1})
    bad = sorted(tmp_path.glob("step-00000002.*.shard"))[-1] if sharded else tmp_path / "step-00000002.pt"
    bad.unlink()
    bad.symlink_to(bad.name if leads_to == "itself" else leads_to)
    with pytest.raises(
        UsageError, match=f"{bad}: the checkpoint cannot be read .{why}.* It may be complete, so no earlier"
    ):
        folder.newest()
    bad.unlink()  # as if moved away
    assert number_of(folder) == 1


def test_one_that_vanishes_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    folder.save(1, {"number": 1})
    monkeypatch.setattr(Folder, "steps", lambda self: [1, 2])
    assert number_of(folder) == 1


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "saved")
    folder.path.rmdir()
    with pytest.raises(UsageError, match=r"saved: the folder cannot be read \(No such file"):
        folder.newest()


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "flipped":
        where = whole.index(np.full(100, 7.0, np.float32).tobytes()) + 123
        path.write_bytes(whole[:where] + bytes([whole[where] ^ 4]) + whole[where + 1 :])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("truncated", "truncated, damaged, or not a checkpoint"),
        ("flipped", "damaged: the checksum of its part"),
        ("empty", "truncated, damaged"),
    ],
)
def test_what_is_damaged_is_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, why: str
) -> None:
    folder = Folder(tmp_path, keep=3)
    for step in (1, 2, 3):
        folder.save(step, {"number": step, "data": torch.full((1000,), 7.0)})
    damage(tmp_path / "step-00000003.pt", how)
    (tmp_path / ".step-00000004.pt.tmp").write_bytes(b"half")
    (tmp_path / "something else.pt").write_bytes(b"")
    assert number_of(folder) == 2
    (line,) = caplog.messages
    assert line.startswith(f"checkpoint skipped: {tmp_path}/step-00000003.pt: {why}")
    folder.save(3, {"number": 33})
    assert number_of(folder) == 33
    assert names(tmp_path) == ["something else.pt", *(f"step-0000000{step}.pt" for step in (1, 2, 3))]


def test_where_all_are_damaged_a_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Folder(tmp_path, keep=2)
    assert folder.newest() is None
    assert caplog.messages == []
    for step in (1, 2):
        folder.save(step, {"number": step})
        damage(tmp_path / f"step-0000000{step}.pt", "truncated")
    assert folder.newest() is None
    *_, last = caplog.messages
    assert last == (f"{tmp_path}: no checkpoint to continue from, because all 2 are incomplete or damaged")


def test_a_save_that_fails_leaves_the_earlier_ones(tmp_path: Path) -> None:
    folder = Folder(tmp_path, keep=1)
    folder.save(1, {"number": 1})
    with pytest.raises(UsageError, match=r"numpy.str_"):
        folder.save(2, {"number": np.str_("a")})
    assert number_of(folder) == 1
    assert names(tmp_path) == ["step-00000001.pt"]


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    keep: Any
    for keep in (0, "2", 1.5, True, None):
        with pytest.raises(UsageError, match=rf"Folder\(keep={keep!r}\): must be a whole number, 1 or more"):
            Folder(tmp_path, keep=keep)
    with pytest.raises(UsageError, match=r"no/where: the folder cannot be created \(No such file"):
        Folder(tmp_path / "no" / "where")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file: the folder cannot be created"):
        Folder(tmp_path / "file")
    step: Any
    for step in (-1, "3", 1.5, True, None, 1 << 63, 10**5000):
        for call in (lambda folder, step: folder.save(step, {}), Folder.load):
            with pytest.raises(
                UsageError, match=r"step (-1|'3'|1\.5|True|None|\.\.\.|\d+): must be a whole number, 0 or"
            ):
                call(Folder(tmp_path), step)
    with pytest.raises(UsageError, match="drop_newer='no': must be True or False"):
        Folder(tmp_path).save(1, {}, drop_newer="no")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="state has the key 'sordino_shards'"):
        Folder(tmp_path).save(1, {"sordino_shards": []})
    assert names(tmp_path) == ["file"]
    Folder(tmp_path, keep=np.int64(1)).save(np.int64(7), {})  # type: ignore[arg-type]
    assert Folder(tmp_path).steps() == [7]
    with pytest.raises(UsageError, match=r"share\(rank=3, size=3\)"):
        checkpoint.share({}, 3, 3)


# --- Shards -----------------------------------------------------------------------------------------------------------

STATE: dict[str, Any] = {
    "model": OrderedDict(a=torch.arange(12.0).reshape(3, 4), empty=torch.zeros(0, 3), half=torch.ones(2).half()),
    "more": [{"nan": torch.full((5,), float("nan")), "step": torch.tensor(7)}, (1, None, "x", float("nan"))],
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) or (a != a and b != b)


@given(size=st.integers(1, 30), shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4))
def test_shares_are_equal_parts_and_make_the_whole(size: int, shapes: list[list[int]]) -> None:
    state = {**STATE, "drawn": [torch.rand(shape) for shape in shapes]}
    shares = [checkpoint.share(state, rank, size) for rank in range(size)]
    assert equal(joined([encoded(share) for share in shares], "state"), state)
    pieces = [[share["model"]["a"], share["model"]["half"], share["more"][0]["nan"]] for share in shares]
    assert all(piece.values.untyped_storage().nbytes() == piece.values.nbytes for each in pieces for piece in each)
    whole = 12 + 2 + 5 + 1 + sum(tensor.numel() for tensor in state["drawn"])
    for share in shares:
        held: list[Any] = [*share["model"].values(), *share["more"][0].values(), *share["drawn"]]
        assert abs(sum(piece.values.numel() for piece in held) - whole / size) < 1


@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_each_share_has_all_of_a_sparse_tensor(layout: str) -> None:
    def sparse(values: torch.Tensor) -> torch.Tensor:
        blocks = (2, 2) if layout.startswith("bs") else None
        return values.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=blocks)

    state = {"sparse": sparse(torch.eye(4)), "dense": torch.arange(5.0)}
    shares = [checkpoint.share(state, rank, 2) for rank in range(2)]
    whole = joined([encoded(share) for share in shares], "state")
    assert whole["sparse"].layout == state["sparse"].layout
    assert torch.equal(whole["sparse"].to_dense(), torch.eye(4))
    assert torch.equal(whole["dense"], state["dense"])
    other = checkpoint.share({**state, "sparse": sparse(2 * torch.eye(4))}, 1, 2)
    with pytest.raises(UsageError, match=r"state\['sparse'\] differs between shards$"):
        joined([encoded(shares[0]), encoded(other)], "state")


def test_shards_keep_states_of_random_generators_and_schedulers(tmp_path: Path) -> None:
    state = {"draws": np.random.RandomState(3).get_state(), "milestones": Counter({5: 2}), "x": np.array([np.nan, 1])}
    sim.run(2, lambda: Folder(tmp_path).save_shards(1, checkpoint.share(state, hvd.rank(), 2)))
    loaded = Folder(tmp_path).load(1)
    assert type(loaded["milestones"]) is Counter
    assert loaded["milestones"] == state["milestones"]
    assert np.array_equal(loaded["draws"][1], state["draws"][1])
    with pytest.raises(UsageError, match=r"state\['x'\] differs between shards$"):
        joined([state, {**state, "x": np.array([np.nan, 2])}], "state")


def piece(*values: float, begin: int = 0, of: int = 4) -> Piece:
    return Piece(torch.tensor(values, dtype=torch.float32), begin, (of,))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([{"x": 1}, {"x": 2}], r"state\['x'\] differs between shards$"),
        ([{"x": torch.ones(2)}, {"x": torch.zeros(2)}], r"state\['x'\] differs between shards$"),
        ([{"x": [1]}, {"x": [1, 2]}], r"state\['x'\] differs between shards in its length"),
        ([{"x": 1}, {"x": True}], r"state\['x'\] differs between shards in its type"),
        ([{"x": piece(1, 2)}, {"x": piece(4, begin=3)}], r"state\['x'\]: .* overlap or leave a gap at element 2"),
        ([{"x": piece(1, 2)}, {"x": piece(2, 3, 4, begin=1)}], r"overlap or leave a gap at element 1"),
        ([{"x": piece(1, 2)}, {"x": piece(begin=2)}], r"state\['x'\]: elements 2 to 3 are in no shard"),
        ([{"x": piece(1, 2)}, {"x": piece(3, begin=2, of=3)}], "different shapes"),
    ],
)
def test_parts_that_make_no_whole_are_refused(parts: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        joined([encoded(part) for part in parts], "state")


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(5000):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (CYCLE, r"state\['x'\]\[0\] contains itself"),
        (deep, r"state\['x'\](\[0\])+ is in more than 100 containers"),
        (piece(3, 4, 5, begin=2), r"Piece\(values=a tensor of shape \(3,\), begin=2, shape=\(4,\)\): values must be"),
        (Piece(torch.ones(2, 2), 0, (4,)), r"Piece\(values=a tensor of shape \(2, 2\)"),
        (Piece(torch.ones(4)[::2], 0, (4,)), "contiguous"),
        (Piece(torch.ones(0), 0, (1 << 62, 8, 0)), "within a tensor of that shape"),
        (Piece(torch.ones(1), 0, 1), "shape=1"),  # type: ignore[arg-type]
        (Piece([1.0], 0, (1,)), "values=a list"),  # type: ignore[arg-type]
        ({"sordino_piece": 1}, "has the key 'sordino_piece', which marks pieces in shards; rename it"),
    ],
)
def test_shards_that_could_not_be_loaded_are_not_saved(tmp_path: Path, value: Any, why: str) -> None:
    """Ranks with a valid part do not wait for the rank with an invalid one."""
    folder = Folder(tmp_path)
    if callable(value):  # a value that deep cannot be printed as the name of a test
        value = value()

    def save() -> None:
        with pytest.raises(UsageError, match=rf"rank 1: .*{why}"):
            folder.save_shards(1, {"x": value if hvd.rank() == 1 else 1})

    sim.run(2, save)
    assert names(tmp_path) == []
    if isinstance(value, list):
        with pytest.raises(UsageError, match=why):
            checkpoint.share({"x": value}, 0, 2)


def test_a_wrong_step_on_one_rank_is_heard_of_on_all(tmp_path: Path) -> None:
    step: Any = "3"

    def save() -> None:
        with pytest.raises(UsageError, match=r"rank 1: step '3': must be a whole number"):
            Folder(tmp_path).save_shards(step if hvd.rank() == 1 else 3, {"x": 1})

    sim.run(2, save)
    assert names(tmp_path) == []


def test_an_error_of_the_disk_on_one_rank_is_heard_of_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        if self.suffix == ".shard":
            raise OSError(5, "Input/output error")
        return real(self, **options)

    def save() -> None:
        with pytest.raises(SordinoError, match=r"rank 0: .*Input/output error"):
            Folder(tmp_path).save_shards(1, {"x": 1})

    monkeypatch.setattr(Path, "stat", stat)
    sim.run(2, save)
    monkeypatch.undo()
    assert names(tmp_path) == []


def test_a_rank_without_memory_is_heard_of_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rank itself, an error that is not Sordino's keeps its type."""

    def summary(part: dict[str, Any]) -> Any:
        if hvd.rank() == 1:
            raise MemoryError("no room")
        return pieces.summary(part)

    def save() -> None:
        with pytest.raises(SordinoError if hvd.rank() == 0 else MemoryError, match="no room"):
            Folder(tmp_path).save_shards(1, {"x": 1})

    monkeypatch.setattr(folder, "summary", summary)
    sim.run(2, save)
    assert names(tmp_path) == []


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shards_saved_on_some_ranks_are_loaded_on_any(tmp_path: Path, size: int) -> None:
    def save() -> None:
        folder = Folder(tmp_path, keep=2)
        for step in (1, 2, 3):
            state = {**STATE, "number": step, "own": {hvd.rank(): torch.rand(2)}}
            own = state.pop("own")
            folder.save_shards(step, {**checkpoint.share(state, hvd.rank(), size), "own": own})
            assert number_of(folder) == step  # complete on every rank when save_shards() returns
            hvd.barrier()

    sim.run(size, save)
    state = Folder(tmp_path).load(3)
    assert sorted(state.pop("own")) == list(range(size))
    assert equal(state, {**STATE, "number": 3})
    assert Folder(tmp_path).steps() == [2, 3]
    assert len(names(tmp_path)) == 2 * (size + 1)
    Folder(tmp_path, keep=1).save(4, {"number": 4})
    assert names(tmp_path) == ["step-00000004.pt"]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([{"loss": 0.5}, {"loss": 0.25}], r"state\['loss'\] differs between shards, so the checkpoint could not"),
        ([checkpoint.share({"x": torch.ones(4)}, 0, size) for size in (2, 2)], r"state\['x'\]: its pieces overlap"),
        ([checkpoint.share({"x": torch.ones(4)}, rank, 3) for rank in (0, 1)], r"state\['x'\]: elements 2 to 3 are"),
        # As many elements as the whole has, but not each once.
        ([checkpoint.share({"x": torch.ones(4), "y": torch.ones(4)}, 0, 2)] * 2, r"state\['x'\]: its pieces overlap"),
        ([{"x": piece(*[1] * count, of=5)} for count in (3, 4)], r"state\['x'\]: its pieces overlap"),
        ([{"x": {"by_rank": {0: loss}}} for loss in (0.5, 0.25)], r"state\['x'\]\['by_rank'\]\[0\] differs"),
    ],
)
def test_parts_that_make_no_whole_replace_no_checkpoint(tmp_path: Path, parts: list[dict[str, Any]], why: str) -> None:
    folder = Folder(tmp_path, keep=1)
    folder.save(1, {"x": 1})

    def save() -> None:
        with pytest.raises(UsageError, match=rf"rank 0: save_shards: {why}"):
            folder.save_shards(2, parts[hvd.rank()])

    sim.run(2, save)
    assert names(tmp_path) == ["step-00000001.pt"]


def test_each_rank_may_add_values_of_its_own(tmp_path: Path) -> None:
    def save() -> None:
        own = {"by_rank": {hvd.rank(): 0.5 * hvd.rank()}}
        state = {"x": torch.ones(5), "loss": own, "sparse": torch.eye(2).to_sparse(), f"of {hvd.rank()}": 1}
        Folder(tmp_path).save_shards(1, checkpoint.share(state, hvd.rank(), 2))

    sim.run(2, save)
    loaded = Folder(tmp_path).load(1)
    assert loaded["loss"] == {"by_rank": {0: 0.0, 1: 0.5}}
    assert "of 0" in loaded
    assert "of 1" in loaded


def test_a_damaged_or_missing_shard_makes_the_checkpoint_incomplete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Folder(tmp_path, keep=5)

    def save() -> None:
        for step in (1, 2, 3, 4):
            state = {"number": step, "data": torch.full((3000,), 7.0)}
            folder.save_shards(step, checkpoint.share(state, hvd.rank(), 3))

    sim.run(3, save)
    for step, how in ((4, "missing"), (3, "flipped"), (2, "truncated")):
        damage(sorted(tmp_path.glob(f"step-0000000{step}.*.shard"))[1], how)
    assert number_of(folder) == 1
    assert [line.rpartition(".shard: ")[2][:12] for line in caplog.messages] == [
        "no such chec",
        "damaged: the",
        "truncated, d",
    ]


@pytest.mark.parametrize(
    ("rank", "step", "value", "why"),
    [
        (1, 2, np.str_("a"), r"rank 1: state\['number'\] is a numpy.str_"),
        (2, 3, 2, "rank 0: save_shards: rank 2 saves step 3, but rank 0 saves step 2"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path, rank: int, step: int, value: object, why: str) -> None:
    folder = Folder(tmp_path, keep=1)

    def save() -> None:
        folder.save_shards(1, {"number": 1})
        with pytest.raises(UsageError, match=why):
            folder.save_shards(*((step, {"number": value}) if hvd.rank() == rank else (2, {"number": 2})))

    sim.run(3, save)
    assert number_of(folder) == 1
    assert len(names(tmp_path)) == 1 + 3, "what failed is not cleared away"
    sim.run(3, lambda: folder.save_shards(2, {"number": 2}))
    assert number_of(folder) == 2


def test_ranks_that_see_different_folders_are_refused(tmp_path: Path) -> None:
    def save() -> None:
        with pytest.raises(UsageError, match="rank 0 cannot see the shard of rank 1; use a shared folder"):
            Folder(tmp_path / str(hvd.rank())).save_shards(1, {"number": 1})

    sim.run(2, save)
    assert names(tmp_path / "0") == names(tmp_path / "1") == []


def test_a_rank_that_is_lost_before_the_end_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    folder = Folder(tmp_path, keep=1)

    def save() -> None:
        folder.save_shards(1, {"number": 1})
        if hvd.rank() == 1:
            raise KeyError("lost")
        with pytest.raises(SordinoError):
            folder.save_shards(2, {"number": 2})

    with pytest.raises(KeyError):
        sim.run(3, save)
    assert folder.steps() == [1] and number_of(folder) == 1
    folder.save(2, {"number": 2})
    assert names(tmp_path) == ["step-00000002.pt"]
