"""init, shutdown, and the properties of the world."""

from __future__ import annotations

import torch

import sordino
import sordino.torch as hvd
from checks.agreement import raises
from checks.registry import Seat, check
from sordino import errors
from sordino.runtime.context import current


@check()
def ranks_and_nodes(seat: Seat) -> None:
    facts = hvd.allgather_object(
        (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous())
    )
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    for local_rank, local_size, cross_rank, cross_size, _ in facts:
        assert 0 <= local_rank < local_size <= seat.size
        assert 0 <= cross_rank < cross_size <= seat.size
    assert len({(fact[0], fact[2]) for fact in facts}) == seat.size
    assert sum(1 for fact in facts if fact[0] == 0) == facts[0][3]
    assert facts[0][4] == (len({fact[1] for fact in facts}) == 1)


@check()
def init_again_does_nothing(seat: Seat) -> None:
    handle = hvd.allreduce_async(torch.ones(3), name="across")
    hvd.init()
    hvd.init(process_sets="dynamic")
    assert hvd.is_initialized() and hvd.size() == seat.size
    assert hvd.synchronize(handle).tolist() == [1, 1, 1]


@check()
def after_shutdown(seat: Seat) -> None:
    made = hvd.add_process_set([0]) if seat.size > 1 else None
    waiting = hvd.allreduce_async(torch.ones(1), name="done before")
    hvd.synchronize(waiting)
    hvd.barrier()
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.local_size,
        hvd.cross_rank,
        hvd.cross_size,
        hvd.is_homogeneous,
    ):
        raises(ValueError, "init", call)
    raises(hvd.HorovodInternalError, "init", hvd.allreduce, torch.ones(1))
    raises(ValueError, "init", hvd.join)
    raises(ValueError, "init", hvd.start_timeline, "/dev/null")
    assert made is None or made.process_set_id is None


@check(on=("processes",))
def init_after_shutdown(seat: Seat) -> None:
    for turn in range(5):
        hvd.shutdown()
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (seat.rank, seat.size)
        assert hvd.allreduce(torch.tensor(float(turn)), op=hvd.Sum).item() == turn * seat.size
        large = hvd.shared_empty(100_000).fill_(1.0)
        hvd.allreduce_(large, op=hvd.Sum)
        assert (large == seat.size).all()


@check(on=("processes",), least=2)
def init_with_process_sets(seat: Seat) -> None:
    hvd.shutdown()
    first, rest = hvd.ProcessSet([0]), hvd.ProcessSet(range(1, seat.size))
    hvd.init(process_sets=[first, rest])
    assert (first.process_set_id, rest.process_set_id) == (1, 2)
    mine = first if seat.rank == 0 else rest
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item() == mine.size()
    hvd.shutdown()
    assert first.process_set_id is None
    hvd.init()


@check(on=("processes",), least=2)
def init_with_some_of_the_ranks(seat: Seat) -> None:
    hvd.shutdown()
    if seat.rank > 0:
        hvd.init(comm=list(range(1, seat.size)))
        assert (hvd.rank(), hvd.size()) == (seat.rank - 1, seat.size - 1)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == seat.size - 1
        hvd.shutdown()
    else:
        raises(ValueError, "rank 0", hvd.init, [1])
    raises(ValueError, str(seat.size), hvd.init, [seat.rank, seat.size])
    raises(ValueError, "comm", hvd.init, 3.5)
    hvd.init()


@check(on=("mpi",))
def init_with_an_mpi4py_communicator(seat: Seat) -> None:
    from mpi4py import MPI

    hvd.shutdown()
    half = MPI.COMM_WORLD.Split(seat.rank % 2, -seat.rank)  # reversed: the order of the communicator counts
    hvd.init(comm=half)
    assert (hvd.rank(), hvd.size()) == (half.Get_rank(), half.Get_size())
    members = hvd.allgather_object(seat.rank)
    assert members == [rank for rank in reversed(range(seat.size)) if rank % 2 == seat.rank % 2]
    assert half.allreduce(1) == half.Get_size()
    hvd.shutdown()
    assert half.allreduce(1) == half.Get_size()  # the communicator is still the user's
    half.Free()
    hvd.init()


@check(on=("mpi",), least=3)
def a_process_set_from_a_communicator(seat: Seat) -> None:
    from mpi4py import MPI

    some = MPI.COMM_WORLD.Split(0 if seat.rank in (0, seat.last) else MPI.UNDEFINED)
    made = hvd.add_process_set(hvd.ProcessSet(some))
    assert made.ranks == sorted({0, seat.last})
    if made.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=made).item() == made.size()
    hvd.remove_process_set(made)


@check()
def what_was_built(seat: Seat) -> None:
    assert hvd.mpi_enabled() == current().world.transport.startswith("mpi")
    assert hvd.mpi_built() or not hvd.mpi_enabled()
    assert not (hvd.gloo_built() or hvd.gloo_enabled() or hvd.ddl_built() or hvd.ccl_built() or hvd.rocm_built())
    assert isinstance(hvd.nccl_built(), int) and isinstance(hvd.cuda_built(), bool)
    assert hvd.mpi_threads_supported() == hvd.mpi_built()
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)


@check()
def names_of_errors(seat: Seat) -> None:
    assert hvd.HorovodInternalError is sordino.SordinoError is errors.SordinoError
    for kind in (errors.UsageError, errors.PeerLost, errors.Timeout, errors.TransportError, errors.NotBuilt):
        assert issubclass(kind, RuntimeError) and issubclass(kind, hvd.HorovodInternalError)
    assert issubclass(errors.OperationMismatch, ValueError) and issubclass(errors.Timeout, TimeoutError)
    import sordino.torch.mpi_ops as mpi_ops

    assert mpi_ops.allreduce is hvd.allreduce and mpi_ops.num_rank_is_power_2(4) and not mpi_ops.num_rank_is_power_2(6)


@check(least=2, who=("the first", "the last"))
def a_rank_that_shuts_down_early(seat: Seat, who: str) -> None:
    """An operation that waits for the rank, or is called later, fails on the others and names the rank that left."""
    leaver = 0 if who == "the first" else seat.last
    waiting = None
    if seat.rank != leaver:
        waiting = hvd.allreduce_async(torch.ones(2), name="before")
    seat.meet("waiting")
    if seat.rank == leaver:
        hvd.shutdown()
    else:
        for turn in range(3):
            try:
                hvd.synchronize(waiting) if turn == 0 else hvd.allreduce(torch.ones(2), name="after")
            except errors.PeerLost as error:
                assert f"rank {leaver}" in str(error) and error.ranks == (leaver,), error
            else:
                raise AssertionError(f"rank {leaver} has left")
    seat.meet("all have failed")
    hvd.shutdown()
    if seat.transport == "processes":
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == seat.size


@check(least=2)
def what_is_decided_is_brought_to_its_end(seat: Seat) -> None:
    """A rank may leave when its own operations are done; the others still get the result."""
    tensor = torch.full((500_000,), float(seat.rank))
    hvd.allreduce_(tensor, op=hvd.Sum)
    hvd.shutdown()
    assert (tensor == sum(range(seat.size))).all()
    if seat.transport == "processes":
        hvd.init()
