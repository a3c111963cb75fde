"""Exit of a rank: leaves the world, or reports the exception that ends the rank to the other ranks."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from sordino.errors import PeerLost
from sordino.log.core import finish
from sordino.rendezvous.notices import tell_of_the_exit, tell_of_the_failure
from sordino.runtime.context import Context, current_or_none

_installed = False


def install(shutdown: Callable[[], None]) -> None:
    """Register `shutdown` for the exit of this process, and a hook for exceptions that end it. Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    atexit.register(_shutdown_at_exit, shutdown)
    previous = sys.excepthook

    def tell_the_others(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report an exception that ends this rank to the other ranks, so that they do not wait for it."""
        previous(cls, error, trace)
        context = current_or_none()
        if context is None:
            return
        if context.size == 1 or issubclass(cls, KeyboardInterrupt):
            if context.recorder is not None:
                context.recorder.failed(error)
            return
        note_failure(context, error)
        context.abort(error)
        finish()
        sys.stdout.flush()
        _pass_on_captured()
        # An orderly exit would wait for ranks that no longer answer. Status 1 makes the launcher end the job. If the
        # other ranks continue, only an end by a signal tells the launcher that this rank is lost.
        if context.survives_losses or os.environ.get("OMPI_MCA_mpi_ft_enable", "0") != "0":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)

    sys.excepthook = tell_the_others


def _pass_on_captured() -> None:
    """Pass captured text of stderr on to the real stderr.

    The hook of torch's init_process_group() captures stderr while it calls this library's hook, and prints the text
    afterwards. This process ends before that.
    """
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        sys.__stderr__.write(sys.stderr.getvalue())
        sys.__stderr__.flush()
    else:
        sys.stderr.flush()


def note_failure(context: Context, error: BaseException) -> None:
    """Write the error into the record. Report this rank's failure to the launcher, unless another one failed first."""
    if context.recorder is not None:
        context.recorder.failed(error)
    # No report if another rank's failure caused this error, or if ranks survive losses.
    if not isinstance(error, PeerLost) and not context.world.failed and not context.survives_losses:
        tell_of_the_failure()


def _shutdown_at_exit(shutdown: Callable[[], None]) -> None:
    tell_of_the_exit()
    try:
        shutdown()
    except Exception:
        # Otherwise Python would end with status 0, as if the last step had been taken.
        traceback.print_exc()
        finish()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
