"""Operations that are over for the ranks' threads before the devices have begun them, on simulated GPUs.

With IPC, devices wait for each other, so a rank continues while inputs are still being computed. Memory that simulated
devices have yet to read or write is kept alive here: unlike GPU memory, it is not reused in the order of a stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import sordino.torch as hvd
from sordino import sim
from sordino._core import Device, sim_device, sim_hold, sim_stream
from sordino.algorithms import Crossover
from sordino.errors import PeerLost, Timeout
from sordino.runtime.context import current
from sordino.runtime.tensors import dtype_code

ELEMENTS = 20_000
KEPT: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_TIMEOUT_S", "60")


def own_gpu(waits_for_words: bool = True) -> Device:
    """Return this rank's own simulated GPU; the rank computes on one of its queues."""
    gpu = sim_device(0, waits_for_words=waits_for_words)
    stream = sim_stream(gpu)
    gpu.current_stream = lambda: stream
    current().host_device = gpu
    settle()  # after this, ranks know the abilities of their devices
    return gpu


@contextmanager
def computing(gpu: Device, here: bool = True) -> Iterator[Callable[[], None]]:
    """Stop the rank's queue, if `here`, until the yielded function is called."""
    assert gpu.current_stream is not None
    go_on = sim_hold(gpu.current_stream()) if here else lambda: None
    try:
        yield go_on
    finally:
        go_on()


def filled(value: float, elements: int = ELEMENTS) -> torch.Tensor:
    """Return a tensor that is kept alive."""
    KEPT.append(torch.full((elements,), value))
    return KEPT[-1]


def settle() -> None:
    """Wait until the devices have done all work so far. Collective."""
    handle = hvd.allreduce_async_(filled(1.0, 1), name="settled")
    while not hvd.poll(handle):
        time.sleep(0.001)
    hvd.synchronize(handle)


def ways() -> dict[str, int]:
    return current().world.gpu_operations


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_no_thread_waits_for_inputs(size: int, shared: bool) -> None:
    """Rank 0 computes while all ranks have returned from ten operations. The results are those of ten operations."""

    def work() -> None:
        gpu = own_gpu()
        value = hvd.shared_empty(ELEMENTS, device="cpu") if shared else filled(0.0)
        value.fill_(float(hvd.rank()))
        with computing(gpu, hvd.rank() == 0) as go_on:
            for turn in range(10):
                hvd.allreduce_(value, op=hvd.Sum, name=f"sum {turn}")
            hvd.barrier()  # all threads have come here
            late = hvd.allreduce_async_(filled(1.0, 1), name="late")
            time.sleep(0.05)
            assert not hvd.poll(late)
            hvd.barrier()
            go_on()
            hvd.synchronize(late)
            settle()
        assert value.tolist() == [sum(range(size)) * float(size) ** 9] * ELEMENTS
        assert set(ways()) == {"IPC"}

    sim.run(size, work)


def test_devices_that_cannot_wait_for_words_are_waited_for() -> None:
    def work() -> None:
        gpu = own_gpu(waits_for_words=hvd.rank() == 0)  # one device that cannot is enough
        begun = threading.Event()
        value = filled(hvd.rank() + 1.0)
        with computing(gpu, hvd.rank() == 0) as go_on:
            thread = threading.Thread(target=lambda: (begun.wait(), time.sleep(0.05), go_on()))
            thread.start()
            handle = hvd.allreduce_async_(value, op=hvd.Sum, name="sum")
            begun.set()
            hvd.synchronize(handle)
            thread.join()
        settle()
        assert value.tolist() == [3.0] * ELEMENTS

    sim.run(2, work)


def test_sets_do_not_wait_for_each_other() -> None:
    """Each set has its own queue: on one queue, operations that ranks begin in different orders would wait forever. A
    copy that one set has made for its peers is not overwritten by another set."""

    def work() -> None:
        gpu = own_gpu()
        pair = hvd.add_process_set([0, 1])
        slow_value, quick_value = filled(2.0), filled(3.0)
        if hvd.rank() < 2:
            warm = hvd.allreduce_async_(filled(1.0), name="warm", process_set=pair)
            hvd.synchronize(warm)
        settle()
        streams = [sim_stream(gpu), sim_stream(gpu)]
        gpu.current_stream = lambda: streams[0]
        with computing(gpu, hvd.rank() == 1) as go_on:
            slow = None
            if hvd.rank() < 2:
                slow = hvd.allreduce_async_(slow_value, op=hvd.Sum, name="slow", process_set=pair)
            hvd.barrier()
            time.sleep(0.02)  # rank 0 has copied, and waits for rank 1
            gpu.current_stream = lambda: streams[1]
            hvd.allreduce_(quick_value, op=hvd.Sum, name="quick")
            settle()
            assert slow is None or not hvd.poll(slow)
            hvd.barrier()
            go_on()
            while slow is not None and not hvd.poll(slow):
                time.sleep(0.001)
        if slow is not None:
            hvd.synchronize(slow)
            assert slow_value.tolist() == [4.0] * ELEMENTS
        assert quick_value.tolist() == [9.0] * ELEMENTS

    sim.run(3, work)


def test_a_set_is_removed_while_its_device_works() -> None:
    def work() -> None:
        gpu = own_gpu()
        pair = hvd.add_process_set([0, 1])
        value = filled(2.0)
        with computing(gpu, hvd.rank() == 0) as go_on:
            if hvd.rank() < 2:
                hvd.allreduce_(value, op=hvd.Sum, name="last", process_set=pair)
            assert hvd.remove_process_set(pair)
            hvd.barrier()
            go_on()
            settle()
        deadline = time.monotonic() + 10
        while hvd.rank() < 2 and value[0].item() != 4.0 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert value.tolist() == [4.0 if hvd.rank() < 2 else 2.0] * ELEMENTS

    sim.run(3, work)


def test_locations_are_not_told_again_before_all_have_read_them() -> None:
    """Many operations with different memory, one after the other: a fast rank does not publish the next location too
    early."""

    def work() -> None:
        own_gpu()
        values = [hvd.shared_empty(ELEMENTS, device="cpu").fill_(1.0 + turn) for turn in range(12)]
        for again in range(5):
            for turn, value in enumerate(values):
                if (turn + again) % hvd.size() == hvd.rank():
                    time.sleep(0.002)
                hvd.allreduce_(value, name=f"mean {again} {turn}")
        settle()
        assert [value[0].item() for value in values] == [1.0 + turn for turn in range(12)]
        assert all(bool((value == value[0]).all()) for value in values)

    sim.run(3, work)


def test_gossip_runs_ahead() -> None:
    """The step is over for all threads while rank 0 computes. Later the models are averages with an unchanged mean."""

    def train() -> list[float]:
        gpu = own_gpu()
        model = torch.nn.Linear(60, 50)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(hvd.rank()))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            named_parameters=model.named_parameters(),
            algorithm=Crossover(),
        )
        model(torch.ones(4, 60)).square().mean().backward()
        settle()
        with computing(gpu, hvd.rank() == 0) as go_on:
            optimizer.step()
            hvd.barrier()
            time.sleep(0.02)
            assert bool((model.weight == hvd.rank()).all())
            hvd.barrier()
            go_on()
            settle()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()

    found = torch.tensor(sim.run(4, train))
    assert torch.equal(found.mean(dim=0), torch.full((3050,), 1.5))
    assert not torch.equal(found[0], torch.zeros(3050))


@pytest.mark.parametrize("late", [0, 1])
def test_gradients_of_a_bucket_are_produced_on_several_streams(late: int) -> None:
    """The reduction waits for the stream of each gradient, not only for that of the last one."""

    def work() -> list[list[float]]:
        gpu = own_gpu()
        streams = [sim_stream(gpu), sim_stream(gpu)]
        added, factor = filled(10.0 * hvd.rank()), torch.tensor([-1.0], dtype=torch.float64)
        parameters = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in streams]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.0), named_parameters=[("a", parameters[0]), ("b", parameters[1])]
        )
        held: list[Callable[[], None]] = []

        def compute_on_own_stream(k: int, parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            gpu.current_stream = lambda: streams[k]
            if k == late:
                held.append(sim_hold(streams[k]))
                rows = [(parameter.grad.data_ptr(), added.data_ptr())]
                gpu.lars_step(dtype_code(added), rows, [ELEMENTS], factor.data_ptr(), 0.0, 0.0, False)

        sum(parameter.sum() for parameter in parameters).backward()  # ranks agree on the bucket at its end
        settle()
        optimizer.zero_grad()
        for k, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(compute_on_own_stream, k))
        sum(parameter.sum() for parameter in parameters).backward()
        hvd.barrier()
        time.sleep(0.02)
        for go_on in held:
            go_on()
        settle()
        return [sorted(set(parameter.grad.tolist())) for parameter in parameters if parameter.grad is not None]

    wanted = [[1.0], [1.0]]
    wanted[late] = [6.0]
    assert sim.run(2, work) == [wanted, wanted]


def test_whoever_leaves_waits_for_its_device() -> None:
    values = [filled(rank + 1.0) for rank in range(2)]

    def work() -> None:
        gpu = own_gpu()
        rank = hvd.rank()
        go_on = sim_hold(gpu.current_stream()) if rank == 0 else None  # type: ignore[misc]
        hvd.allreduce_(values[rank], op=hvd.Sum, name="last")
        if go_on is not None:
            threading.Timer(0.3, go_on).start()

    sim.run(2, work)
    assert [value.tolist() for value in values] == [[3.0] * ELEMENTS] * 2


def test_who_computes_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_TIMEOUT_S", "0.5")

    def work() -> None:
        gpu = own_gpu()
        with computing(gpu, hvd.rank() == 1) as go_on:
            hvd.allreduce_(filled(1.0), name="slow")
            text = r"'allreduce\.slow' has been on the GPU for .* rank 1 is furthest behind"
            with pytest.raises(Timeout, match=text):
                while True:
                    hvd.barrier()
            go_on()

    sim.run(2, work)


def test_a_peer_that_is_lost_holds_nobody_up() -> None:
    """The work on the device ends without a result, and waiting for it raises."""
    told: list[str] = []
    through = threading.Event()

    def work() -> None:
        gpu = own_gpu()
        value = filled(1.0)
        with computing(gpu, hvd.rank() == 1):
            handle = hvd.allreduce_async_(value, name="in vain")
            hvd.barrier()
            if hvd.rank() == 1:
                through.wait()
                raise RuntimeError("rank 1 has had enough")
            through.set()
            with pytest.raises(PeerLost, match="had enough") as error:
                while True:
                    hvd.allreduce_(value, name="next")
            assert error.value.ranks == (1,)
            while not hvd.poll(handle):
                time.sleep(0.001)
            with pytest.raises(PeerLost, match="had enough"):
                hvd.synchronize(handle)
            told.append("synchronize raises")

    with pytest.raises(RuntimeError, match="had enough"):
        sim.run(2, work)
    assert told == ["synchronize raises"]


def test_where_ranks_go_on_results_are_there_when_they_are_used() -> None:
    """Ranks tell each other whether they have a result, and must not report one that is still in flight."""

    def work() -> None:
        gpu = own_gpu()
        value = filled(hvd.rank() + 1.0)
        with computing(gpu, hvd.rank() == 0) as go_on:
            if hvd.rank() == 0:
                threading.Timer(0.1, go_on).start()
            begun = time.monotonic()
            hvd.allreduce_(value, op=hvd.Sum, name="sum")
            assert time.monotonic() - begun > 0.05
        settle()
        assert value.tolist() == [3.0] * ELEMENTS

    sim.run(2, work, on_peer_lost="continue")
