"""Life of the default context: init, shutdown, and what Horovod's basics tell about ranks and builds."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

from sordino import _core
from sordino.algorithms import Algorithm, AlgorithmName
from sordino.errors import PeerLost, UsageError
from sordino.launch.starts import MpiStart, ProcessStart, Start, find_start, note_the_variables, started_by_a_rank
from sordino.launch.telling import tell_of_the_exit, tell_of_the_failure
from sordino.log import logger
from sordino.log.core import finish, listen
from sordino.runtime.context import Context, Resized, current, current_or_none, is_no_rank, replace_current
from sordino.runtime.helpers import Helpers
from sordino.runtime.process_set import ProcessSet, unbind_all
from sordino.runtime.recorder import Recorder, folder_of
from sordino.slips import misspelt_variables
from sordino.torch.process_sets import add_process_set
from sordino.torch.start import goes_on, helped

_log = logger(__name__)
_NO_RANK = (
    "this is a process that {0} has started by multiprocessing, such as a worker of a DataLoader. It has run the top "
    "of the script, but it is no rank. Put the code for ranks under `if __name__ == '__main__':`"
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

    Who the ranks are is found out: `sordino run`, mpirun and srun, torchrun and what sets the same variables (RANK,
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or torch.distributed where it has been initialised. How they reach each other
    SORDINO_TRANSPORT says, or it is found out likewise (docs/transports.md).

    Args:
        comm: None for all ranks that the launcher started; a list of their ranks; or an mpi4py communicator.
        process_sets: process sets to register at once, the same list on all ranks. ("dynamic" is accepted for
            Horovod's sake: sets can always be added later.)
        algorithm: the one that is to be used. Only some need it: with `Layered(communicator="rank")` the last rank of
            each group, with `ParameterSkipping(dedicated_servers=True)` the last ranks of all have no model. There
            init() serves the workers until they shut down, and then ends the script with status 0; `rank()` and
            `size()` count workers only. Once for a process.
        on_peer_lost: what becomes of the others when a rank is lost. "raise": every operation raises `PeerLost`.
            "continue": they go on without it; `rank()` and `size()` change, and `on_resize()` tells of it (see
            docs/faults.md). None: as `SORDINO_ON_PEER_LOST` says, which is "raise" where it is not set.
        store: a torch.distributed.Store at which the ranks meet, with `rank` and `world_size`.
        rank: of this process, with `store`.
        world_size: how many ranks there are, with `store`.
        record: a folder in which this rank writes down its run, for `sordino report` (docs/report.md). None: as
            `SORDINO_RECORD` says, which is nowhere where it is not set.

    Without a launcher (`python train.py`) the world has one rank and MPI is not started.

    A process that a rank has started by `multiprocessing`, as a worker of its DataLoader, is no rank: there init() does
    nothing, and what needs a rank raises UsageError.

    Raises:
        UsageError: it has been called before, with other arguments; or `comm` is of another type, or names ranks that
            do not exist; or the ranks do not make groups; or the record cannot be written; or a launcher has started
            several processes, and there is no way from one to the other, or several launchers contradict each other.
        ConfigurationMismatch: ranks have other versions of Sordino, or other settings; on all of them.
        NotBuilt: MPI's launcher started several processes, but this build has no MPI; or the ranks are on several
            machines, and it has no UCX.
        Timeout: not all ranks came within SORDINO_TIMEOUT_S; it names them.
        TransportError: MPI or UCX failed, the launcher belongs to another MPI than the one Sordino was built with, or
            the store does not answer.
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
    outlast = goes_on(on_peer_lost, algorithm)
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
    if dedicated is None:
        context = Context(start.world(None, outlast, ranks))
    else:
        context = _with_helpers(start, ranks, dedicated)
    replace_current(context)
    context.arguments = given
    if isinstance(start, ProcessStart) and store is None:
        note_the_variables()
    _install_exit_handlers()
    _log.debug("rank %d is process %d on %s", context.rank, os.getpid(), _core.host_name())
    if context.rank == 0:
        nodes = len(set(context.world.nodes))
        _log.info("ranks: %d, nodes: %d, transport: %s", context.size, nodes, context.world.transport)
        for line in misspelt_variables(os.environ, (name for name, *_ in _core.variables())):
            _log.warning("warning: %s", line)
    if folder:
        context.recorder = Recorder(context, folder)
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise UsageError(f"init(process_sets={process_sets!r}): expected a list of process sets or 'dynamic'")
    else:
        for process_set in process_sets or ():
            add_process_set(process_set)


def _require_the_same(context: Context, given: dict[str, Any]) -> None:
    """Raise UsageError for arguments of another call of `init()` that would have made another world.

    Of a world that `init()` has not made, as of one of `sordino.sim`, the arguments are not known.
    """
    first = context.arguments
    if first is None:
        return
    for name, value in given.items():
        if value is None:
            continue
        if name == "on_peer_lost":
            same = goes_on(value, given["algorithm"]) == context.outlasts
        elif name == "algorithm":
            same = helped(value) == (context.helpers.algorithm if context.helpers is not None else None)
        else:
            same = _comparable(value) == _comparable(first[name])
        if not same:
            raise UsageError(
                f"init({name}={value!r}): Sordino has been initialised already, with {name}={first[name]!r}. Give the "
                "same arguments, or call shutdown() first"
            )


def _comparable(value: Any) -> Any:
    """Return an argument of `init()` in a form in which equal meanings are equal values."""
    if isinstance(value, ProcessSet):
        return _comparable(value.ranks)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_comparable(one) for one in value]
    return value


def _with_helpers(start: Start, ranks: tuple[int, ...], algorithm: Algorithm) -> Context:
    """Return a worker's context; on helpers it does not return."""
    if isinstance(start, MpiStart) and start.fortran_handle is not None:
        raise UsageError(
            "init(algorithm=...) with ranks that have no model takes comm=None or a list of ranks, not an mpi4py "
            "communicator"
        )
    everybody = Context(start.world(algorithm, False, ranks))
    everybody.world.stop_trace()  # the workers' world writes the file that the environment asks for
    try:
        helpers = Helpers(everybody, algorithm)
        if everybody.rank not in helpers.roles.helpers:
            names = ranks or tuple(range(everybody.size))
            workers = [names[rank] for rank in helpers.roles.workers]
            context = Context(start.world(algorithm, False, workers))
            context.helpers = helpers
            return context
        helpers.serve()
    except BaseException as error:
        if isinstance(error, UsageError) or everybody.world.failed:
            everybody.shutdown()  # the others know
        else:
            everybody.abort(f"{type(error).__name__}: {error}")
        raise
    everybody.shutdown()
    sys.exit(0)


def _check_type(comm: Any) -> None:
    is_list = isinstance(comm, Sequence) and all(isinstance(rank, int) for rank in comm)
    if not (comm is None or is_list or hasattr(comm, "py2f")):
        raise UsageError(
            f"Invalid type of argument comm: {type(comm).__name__}. Expected None, a list of ranks or an mpi4py "
            "communicator."
        )


_handlers_installed = False


def _install_exit_handlers() -> None:
    global _handlers_installed
    if _handlers_installed:
        return
    _handlers_installed = True
    atexit.register(_shutdown_at_exit)
    previous = sys.excepthook

    def tell_the_others(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell the others of an exception that ends this rank, which must not leave them waiting for it."""
        previous(cls, error, trace)
        context = current_or_none()
        if context is None:
            return
        if context.size == 1 or issubclass(cls, KeyboardInterrupt):
            if context.recorder is not None:
                context.recorder.failed(error)
            return
        _note_failure(context, error)
        context.abort(_text_of(error))
        finish()
        sys.stdout.flush()
        sys.stderr.flush()
        # An orderly exit would wait for ranks that no longer answer. The launcher ends the job on this status; where
        # the others go on it waits for a process that exits so, and only a signal tells it that this one is lost.
        if context.outlasts or os.environ.get("OMPI_MCA_mpi_ft_enable", "0") != "0":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)

    sys.excepthook = tell_the_others


def _note_failure(context: Context, error: BaseException) -> None:
    """Write the error into the record, and tell the launcher that this rank failed, unless another one did first."""
    if context.recorder is not None:
        context.recorder.failed(error)
    # Not where another rank ends the job, whose loss this error tells of, or none does.
    if not isinstance(error, PeerLost) and not context.world.failed and not context.outlasts:
        tell_of_the_failure()


def _text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _shutdown_at_exit() -> None:
    tell_of_the_exit()
    try:
        shutdown()
    except Exception:
        # Python would end with status 0, as if the last step had been taken.
        traceback.print_exc()
        finish()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def shutdown() -> None:
    """Complete a step that was postponed, and leave the world.

    Operations that still wait for this rank fail on the others. Where an error is being handled, as in a `finally:`
    block that it has led to, the others are told of it. `init()` may follow, but not after one with ranks that have no
    model, which have ended.
    """
    context = current_or_none()
    if context is None:
        return
    error = sys.exc_info()[1]
    in_error = isinstance(error, Exception) and context.size > 1 and not context.world.failed
    try:
        if error is not None and in_error:
            _note_failure(context, error)
            context.shutdown(_text_of(error))
        else:
            context.shutdown()
    except Exception:
        if not in_error:  # else the error that is being handled matters
            raise
    finally:
        replace_current(None)
        unbind_all(context)


def on_resize(callback: Callable[[int, int], None]) -> None:
    """Have `callback(before, now)` called, with numbers of ranks, whenever ranks have been lost and this one goes on.

    It is called on every rank that is left, before the operation returns in which it was noticed. It may call
    operations, as all do. If another rank is lost in one of them it is called again, with the same `before`.
    """
    context = current()
    context.on_resize.append(Resized(callback, context.size))


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
    """Return this process's number among those of its node."""
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
        bytes_sent (payload bytes, of which bytes_sent_inside_node and bytes_sent_across_nodes), operations (of which
        operations_in_one_shot: small ones that came again and needed no agreement), and exposed_seconds: how long calls
        have waited for communication.
    """
    context = current()
    counters = Counter(context.world.stats)
    if context.helpers is not None:
        counters.update(context.helpers.context.world.stats)
    counters["exposed_seconds"] = counters.pop("waited_seconds")
    return dict(counters)


def record(step: int | None = None, **metrics: Any) -> None:
    """Note how training goes, in this rank's record; without one (`init(record=...)`) this does nothing.

    The report draws the mean over the ranks, and how far they spread, so tell it what each rank finds by itself.

    Args:
        step: of training; from then on steps are counted from there, which a script that goes on from a checkpoint
            says once. None: as many as `DistributedOptimizer`s have taken since `init()`.
        **metrics: numbers by their name, such as `loss=loss, accuracy=0.9`; tensors of one element, too.

    Raises:
        UsageError: a metric is not one number.
    """
    recorder = current().recorder
    if recorder is not None:
        recorder.metrics(step, metrics)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a Chrome trace of all operations to `file_path` (rank 0 only, as in Horovod).

    What goes through ranks that have no model is in `file_path` + ".helpers".
    """
    context = current()
    if "\0" in str(file_path):
        raise UsageError(f"start_timeline({file_path!r}): no path has a NUL character in it; take it out")
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


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Check that the compiled core for a framework is there: for torch always, or this module could not be imported.

    Args:
        ext_name: the module, such as "horovod.torch".
        ext_env_var: what Horovod's message names; not looked at, for Sordino has one core, elsewhere.
        pkg_path: where Horovod looks; not looked at either.
        *args: where Horovod looks below it; not looked at either.

    Raises:
        ImportError: it is for another framework.
    """
    if ext_name.rpartition(".")[2] != "torch":
        raise ImportError(f"{ext_name} is not there: Sordino is for PyTorch alone")


def mpi_threads_supported() -> bool:
    """Return whether other threads may use MPI as well: always, since init insists on it."""
    current()
    return mpi_built()


def mpi_enabled() -> bool:
    """Return whether this world runs over MPI."""
    context = current_or_none()
    return context is not None and context.world.transport.startswith("mpi")


def transport() -> str:
    """Return how the ranks of this world reach each other: "local", "mpi", "ucx" (and shared memory), or "sim"."""
    return str(current().world.transport)


def mpi_built() -> bool:
    """Return whether this build contains the MPI transport."""
    return _core.build_info()["mpi"] is not None


def gloo_built() -> bool:
    """Return False always: Sordino does not use Gloo."""
    return False


def gloo_enabled() -> bool:
    """Return False always: Sordino does not use Gloo."""
    return False


def nccl_built() -> int:
    """Return the NCCL version code, or 0 where NCCL is not built in."""
    return 0


def cuda_built() -> bool:
    """Return whether this build contains the CUDA kernels."""
    return bool(_core.build_info()["cuda"])


def rocm_built() -> bool:
    """Return False always: Sordino has no ROCm kernels."""
    return False


def ddl_built() -> bool:
    """Return False always: Sordino does not use IBM DDL."""
    return False


def ccl_built() -> bool:
    """Return False always: Sordino does not use oneCCL."""
    return False
