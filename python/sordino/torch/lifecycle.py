"""Life of the default context: init, shutdown, and Horovod's functions about ranks."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from sordino import _core
from sordino.algorithms import Algorithm, AlgorithmName
from sordino.errors import UsageError
from sordino.inspection import metrics, server
from sordino.log import logger
from sordino.log.core import listen
from sordino.rendezvous.children import note_the_variables, started_by_a_rank
from sordino.rendezvous.find_start import find_start, forget
from sordino.rendezvous.starts import AloneStart, MpiStart, ProcessStart, Start
from sordino.runtime.context import Context, current, current_or_none, is_no_rank, living_contexts, replace_current
from sordino.runtime.exchange.helpers import Helpers
from sordino.runtime.loss_state import Resized
from sordino.runtime.process_set import ProcessSet, unbind_all
from sordino.runtime.recorder import Recorder, folder_of
from sordino.suggestions import misspelt_variables
from sordino.torch import exits
from sordino.torch.process_sets import add_process_set
from sordino.torch.start import helped, survives_losses

_log = logger(__name__)
_NO_RANK = (
    "{0} has started this process by multiprocessing, such as a worker of a DataLoader. It has run the top of the "
    "script, but it is not a rank. Put the code for ranks under `if __name__ == '__main__':`"
)


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    algorithm: Algorithm | AlgorithmName | None = None,
    on_peer_lost: Literal["raise", "continue"] | None = None,
    store: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    record: str | os.PathLike[str] | None = None,
) -> None:
    """Join the world. Collective: all ranks of the job call it.

    A second call with the same arguments, or with none, does nothing.

    The ranks are determined by `sordino run`, mpirun, srun, torchrun or another launcher that sets its variables (RANK,
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or by torch.distributed if it has been initialized. SORDINO_TRANSPORT selects
    the transport; otherwise it is determined from the launcher as well (docs/transports.md).

    Args:
        comm: None for all ranks that the launcher started; a list of their ranks; or an mpi4py communicator.
        process_sets: process sets to register at once, the same list on all ranks. ("dynamic" is accepted for
            compatibility with Horovod: sets can always be added later.)
        algorithm: the algorithm to be used. Only some algorithms need it: with `Layered(communicator="rank")` the last
            rank of each group has no model, with `CaPS(dedicated_servers=True)` the last ranks of the job have none. On
            these ranks, init() serves the workers until they shut down, and then ends the script with status 0.
            `rank()` and `size()` count workers only. Possible once per process.
        on_peer_lost: effect of a lost rank on the others. "raise": every operation raises `PeerLost`. "continue": the
            remaining ranks continue; `rank()` and `size()` change, and `on_resize()` reports it (docs/faults.md). None:
            the value of `SORDINO_ON_PEER_LOST`, by default "raise".
        store: a torch.distributed.Store through which the ranks meet, with `rank` and `world_size`.
        rank: rank of this process, with `store`.
        world_size: number of ranks, with `store`.
        record: folder in which this rank records its run, for `sordino report` (docs/report.md). None: the value of
            `SORDINO_RECORD`, by default no record.

    Without a launcher (`python train.py`) the world has one rank and MPI is not started.

    A process that a rank has started by `multiprocessing`, such as a worker of its DataLoader, is not a rank. There
    init() does nothing, and functions that need a rank raise UsageError. In another program that a rank has started,
    with its variables, init() raises UsageError.

    Raises:
        UsageError: it was called before with other arguments; `comm` has another type, or names ranks that do not
            exist; the ranks cannot be divided into groups; the record cannot be written; a launcher has started several
            processes but gave no address to reach them; several launchers contradict each other; or a rank has started
            this program.
        ConfigurationMismatch: ranks have different versions of Sordino, or different settings. Raised on all ranks.
        NotBuilt: MPI's launcher started several processes, but this build has no MPI; or the ranks are on several
            machines, and this build has no UCX.
        Timeout: not all ranks came within SORDINO_TIMEOUT_S. The message names the missing ranks.
        TransportError: MPI or UCX failed, the launcher belongs to another MPI than Sordino was built with, or the store
            does not answer.
    """
    given = {
        "comm": comm,
        "process_sets": None if process_sets == "dynamic" else process_sets,
        "algorithm": algorithm,
        "on_peer_lost": on_peer_lost,
        "store": store,
        "rank": rank,
        "world_size": world_size,
        "record": record,
    }
    before = current_or_none()
    if before is not None:
        _require_the_same(before, given)
        return
    dedicated = helped(algorithm)
    survivable = survives_losses(on_peer_lost, algorithm)
    folder = folder_of(record)
    _check_type(comm)
    if not hasattr(comm, "py2f") and store is None:
        owner = started_by_a_rank()
        is_no_rank(_NO_RANK.format(owner) if owner else "")
        if owner:
            return
    listen()
    start = find_start(comm, store, rank, world_size)
    ranks = () if comm is None or hasattr(comm, "py2f") else tuple(comm)
    try:
        if isinstance(start, ProcessStart) and start.newcomer:
            context = _newcomer(start, survivable or on_peer_lost is None, ranks, dedicated)
        elif dedicated is None:
            context = Context(start.world(None, survivable, ranks), start=start)
        else:
            context = _with_helpers(start, ranks, dedicated)
    except BaseException:
        forget(start)  # the next attempt is another start
        raise
    replace_current(context)
    context.arguments = given
    if isinstance(start, ProcessStart) and store is None:
        note_the_variables()
    exits.install(shutdown)
    _log.debug("rank %d is process %d on %s", context.rank, os.getpid(), _core.host_name())
    if context.rank == 0:
        nodes = len(set(context.world.nodes))
        _log.info("ranks: %d, nodes: %d, transport: %s", context.size, nodes, context.world.transport)
        for line in misspelt_variables(os.environ, (name for name, *_ in _core.variables())):
            _log.warning("warning: %s", line)
    if folder:
        context.record_by(Recorder(context, folder))
    if context.newcomer is None:
        context.world.start_trace_of_settings()
        _let_others_look(context)
    else:  # its local rank, by which it is found, is known only after it has joined
        context.losses.on_resize.append(Resized(lambda *_: _let_others_look(context, joined=True), context.size))
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise UsageError(f"init(process_sets={process_sets!r}): expected a list of process sets or 'dynamic'")
    else:
        for process_set in process_sets or ():
            add_process_set(process_set)


def _newcomer(start: ProcessStart, survivable: bool, ranks: tuple[int, ...], dedicated: Algorithm | None) -> Context:
    """Return the context of a process that joins the running job later, in `elastic.run`."""
    if not survivable or ranks or dedicated is not None:
        raise UsageError(
            "this process is to join a running job: call init(on_peer_lost='continue') without `comm`, and without an "
            "algorithm in which some ranks have no model"
        )
    return Context(AloneStart().world(None, True), start=start, newcomer=start.rank)


def _let_others_look(context: Context, joined: bool = False) -> None:
    """Answer `sordino inspect`, and serve Prometheus if SORDINO_METRICS asks for it."""
    answers, address = _core.inspection()
    if answers:
        server.start()
    if address:
        metrics.start(address, context.local_rank, joined)


def _require_the_same(context: Context, given: dict[str, Any]) -> None:
    """Raise UsageError if the arguments of another call of `init()` would have made a different world.

    The arguments of a world that `init()` has not made, such as one of `sordino.sim`, are not known.
    """
    first = context.arguments
    if first is None:
        return
    for name, value in given.items():
        if value is None:
            continue
        if name == "on_peer_lost":
            same = survives_losses(value, given["algorithm"]) == context.survives_losses
        elif name == "algorithm":
            same = helped(value) == (context.helpers.algorithm if context.helpers is not None else None)
        else:
            same = _comparable(value) == _comparable(first[name])
        if not same:
            raise UsageError(
                f"init({name}={value!r}): Sordino has already been initialized, with {name}={first[name]!r}. Give the "
                "same arguments, or call shutdown() first"
            )


def _comparable(value: Any) -> Any:
    """Return an argument of `init()` in a form in which equal meanings compare equal."""
    if isinstance(value, ProcessSet):
        return _comparable(value.ranks)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_comparable(one) for one in value]
    return value


def _with_helpers(start: Start, ranks: tuple[int, ...], algorithm: Algorithm) -> Context:
    """Return a worker's context. On helpers this does not return."""
    if isinstance(start, MpiStart) and start.fortran_handle is not None:
        raise UsageError(
            "init(algorithm=...) with ranks without a model needs comm=None or a list of ranks, not an mpi4py "
            "communicator"
        )
    all_ranks = Context(start.world(algorithm, False, ranks))
    try:
        helpers = Helpers(all_ranks, algorithm)
        if all_ranks.rank not in helpers.roles.helpers:
            names = ranks or tuple(range(all_ranks.size))
            workers = [names[rank] for rank in helpers.roles.workers]
            context = Context(start.world(algorithm, False, workers))
            context.helpers = helpers
            return context
        helpers.serve()
    except BaseException as error:
        if isinstance(error, UsageError) or all_ranks.world.failed:
            all_ranks.shutdown()  # the other ranks know of the error
        else:
            all_ranks.abort(error)
        raise
    all_ranks.shutdown()
    sys.exit(0)


def _check_type(comm: Any) -> None:
    is_list = isinstance(comm, Sequence) and all(isinstance(rank, int) for rank in comm)
    if not (comm is None or is_list or hasattr(comm, "py2f")):
        raise UsageError(
            f"Invalid type of argument comm: {type(comm).__name__}. Expected None, a list of ranks or an mpi4py "
            "communicator."
        )


def shutdown() -> None:
    """Complete a step that was postponed, and leave the world.

    Operations that still wait for this rank fail on the others. If an error is being handled, such as in a `finally:`
    block, it is reported to the other ranks. `init()` may follow, except after an init with ranks that have no model,
    because the processes of these ranks have ended.
    """
    context = current_or_none()
    if context is None:
        return
    error = sys.exc_info()[1]
    in_error = isinstance(error, Exception) and context.size > 1 and not context.world.failed
    if isinstance(context.start, ProcessStart):
        context.start.end(over=error is None and context.rank == 0 and context.newcomer is None)
    try:
        if error is not None and in_error:
            exits.note_failure(context, error)
            context.shutdown(error)
        else:
            context.shutdown()
    except Exception:
        if not in_error:  # otherwise the error that is being handled matters
            raise
    finally:
        forget(context.start)
        replace_current(None)
        unbind_all(context)
        if not living_contexts():
            server.stop()
            metrics.stop()


def on_resize(callback: Callable[[int, int], None]) -> None:
    """Register `callback(before, now)`, called with numbers of ranks when ranks were lost, have joined or have left.

    All ranks call it, before the operation that noticed the loss returns, so it may call collective operations. If
    another rank is lost in one of them, it is called again, with the same `before`.
    """
    context = current()
    context.losses.on_resize.append(Resized(callback, context.size))


def is_initialized() -> bool:
    """Return whether `init()` has been called (and `shutdown()` has not)."""
    return current_or_none() is not None


def rank() -> int:
    """Return this process's number, from 0 to `size() - 1`."""
    return current().rank


def size() -> int:
    """Return the number of processes of the job."""
    return current().size


def local_rank() -> int:
    """Return this process's number among the processes of its node."""
    return current().local_rank


def local_size() -> int:
    """Return the number of processes on this node."""
    return current().local_size


def cross_rank() -> int:
    """Return this node's number among the nodes that have a process with this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a process with this local rank."""
    return current().cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of processes."""
    return current().is_homogeneous


def stats() -> dict[str, float]:
    """Return cumulative counters of this rank.

    Returns:
        bytes_sent (payload bytes, also divided into bytes_sent_inside_node and bytes_sent_across_nodes), operations (of
        which operations_in_one_shot: repeated small ones that needed no negotiation), and exposed_seconds (the time
        that calls have waited for communication).
    """
    context = current()
    counters = Counter(context.world.stats)
    if context.helpers is not None:
        counters.update(context.helpers.context.world.stats)
    counters["exposed_seconds"] = counters.pop("waited_seconds")
    return dict(counters)


def record(step: int | None = None, **metrics: Any) -> None:
    """Write metrics of the training into this rank's record. Without a record (`init(record=...)`) this does nothing.

    The report draws the mean over ranks and their range, so pass the values of this rank alone.

    Args:
        step: number of the training step. Later steps are counted from it, so a script that resumes from a checkpoint
            needs to pass it once. None: the number of steps of all `DistributedOptimizer`s since `init()`.
        **metrics: numbers by name, such as `loss=loss, accuracy=0.9`. Tensors of one element are allowed.

    Raises:
        UsageError: a metric is not one number.
    """
    recorder = current().recorder
    if recorder is not None:
        recorder.metrics(step, metrics)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a Chrome trace of all operations to `file_path` (rank 0 only, as in Horovod).

    The trace of operations with ranks that have no model is in `file_path` + ".helpers".
    """
    context = current()
    if "\0" in str(file_path):
        raise UsageError(f"start_timeline({file_path!r}): a path must not contain a NUL character; remove it")
    if context.rank == 0:
        context.world.start_trace(file_path, mark_cycles)
        if context.helpers is not None:
            context.helpers.context.world.start_trace(file_path + ".helpers", mark_cycles)


def stop_timeline() -> None:
    """Complete and close the trace that `start_timeline` began."""
    context = current()
    context.world.stop_trace()
    if context.helpers is not None:
        context.helpers.context.world.stop_trace()
