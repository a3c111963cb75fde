"""Operations without tensors: `join`, for a rank that has no more data, and `barrier`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sordino._core import Request
from sordino.errors import UsageError
from sordino.runtime import opcode
from sordino.runtime.collectives.operation import Operation
from sordino.runtime.context import Context, current, use
from sordino.runtime.process_set import ProcessSet, global_process_set


def _stand_in(context: Context) -> None:
    """Call `context.callbacks.while_joined` in parallel threads, because the other ranks may need them in any order."""
    work = context.callbacks.while_joined.living()

    def run(one: Callable[[], None]) -> None:
        with use(context):
            one()

    if work:
        with ThreadPoolExecutor(len(work)) as threads:
            for result in [threads.submit(run, one) for one in work]:
                result.result()


def join(device: int = -1) -> int:
    """Announce that this rank has no more data, and wait until all ranks have. Collective.

    Until then this rank contributes zeros to other ranks' all-reduces (Average still divides by the full size), and
    their barriers do not wait for it. Their other operations raise OperationMismatch, as zeros cannot replace its data.

    Args:
        device: ignored; exists for compatibility with Horovod.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        UsageError: ranks continue after a loss (on_peer_lost="continue").
    """
    context = current()
    if context.survives_losses:
        # Ranks that have taken different numbers of steps could not agree on the step to repeat after a loss.
        raise UsageError(
            "join() cannot be used with on_peer_lost='continue', with which all ranks take the same steps; use "
            "on_peer_lost='raise', or an hvd.elastic.ElasticSampler, which gives each rank equally many batches"
        )
    if context.callbacks.while_joined:
        gc.collect()  # objects that other ranks have released must not wait for them here
    for prepare in context.callbacks.on_join.living():
        prepare()
    handle = context.world.submit(Request(opcode.JOIN, "join", []))
    _stand_in(context)
    handle.wait()
    context.names.joined()
    context.note_return()
    return handle.last_rank


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called this. Collective."""
    if not current().repeat_and_note(opcode.BARRIER, True, None, None, "barrier", process_set.process_set_id):
        Operation(opcode.BARRIER, "barrier", "barrier", [], lambda _: None, process_set).run()
