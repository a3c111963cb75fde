"""Errors and warnings about scripts that compute, change or clear gradients while ranks use them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from sordino.errors import OperationMismatch, StepOrderError

_NAMED = 8  # maximum number of parameters in an error

_SKIPPED = "After a step that a GradScaler has skipped, clear gradients by optimizer.zero_grad() instead of the model's"

QUIETLY = "Put all backward() but the last one before step() in optimizer.no_sync()"

_CUT_OFF = (
    "an exception ended the previous backward() while its gradients were being reduced. If all ranks raised it, call "
    "optimizer.synchronize() and then optimizer.zero_grad(), and continue with the next batch. If the other ranks have "
    "no exception, they wait for this one: call optimizer.synchronize(), and then step() in "
    "optimizer.skip_synchronize()"
)


def after_cut_off(problem: str) -> StepOrderError:
    """Return the error of a call that is not possible because an exception has ended a backward."""
    return StepOrderError(f"{problem}: {_CUT_OFF}")


def warn_of_unused(name: str) -> None:
    """Warn that gradients, of the parameter `name` and others, were reduced and then cleared before a step."""
    warnings.warn(
        f"the gradient of '{name}' and others were reduced at the end of an earlier backward(), and cleared before a "
        "step() used them. Every backward() through this optimizer's parameters sends their gradients, also for the "
        "loss of another model (the generator's, through the discriminator): put that backward() in "
        f"optimizer.no_sync(), or freeze the parameters for it (requires_grad_(False)). {_SKIPPED}",
        stacklevel=3,
    )


def warn_of_repetition(name: str) -> None:
    """Warn that a backward adds to reduced gradients, the first of which is of the parameter `name`."""
    warnings.warn(
        f"gradients are reduced in every backward() of a step: this backward() adds to '{name}', "
        f"which was sent at the end of the previous one. {QUIETLY}, so that they are sent once. {_SKIPPED}",
        stacklevel=3,
    )


def added_to_reduced(name: str) -> StepOrderError:
    """Return the error of a backward that adds to a gradient that cannot be reduced again."""
    return StepOrderError(
        "Gradients were computed more than backward_passes_per_step times before call to step(): all were reduced at "
        f"the end of the previous backward(), and this one adds to '{name}'. {QUIETLY}, or increase "
        f"backward_passes_per_step. {_SKIPPED}"
    )


def changed_in_flight(names: Sequence[str]) -> StepOrderError:
    """Return the error of gradients, of the parameters `names`, that were changed while they were being reduced."""
    listed = ", ".join(map(repr, names[:_NAMED]))
    return StepOrderError(
        f"the gradient of {listed} was changed while it was being reduced, by a hook of a module or of another tensor, "
        "or by another thread. Change gradients in a hook of their parameter (register_hook, "
        "register_post_accumulate_grad_hook), or between backward() and step()"
    )


def changed_on_some_ranks(error: OperationMismatch) -> OperationMismatch:
    """Return the error of ranks whose optimizers have different parameters, given the error of the reduction."""
    return OperationMismatch(
        f"{error}. These are gradients: some ranks have changed the parameters of their optimizers "
        "(param_groups, a cast), and others have not. Change them on all ranks, before the same step"
    )


def changed_since_backward() -> StepOrderError:
    """Return the error of an optimizer whose parameters have changed since their gradients were sent."""
    return StepOrderError(
        "the parameters of the wrapped optimizer were changed between backward() and step(): change them on "
        "all ranks, before backward() or after step()"
    )


def cleared_in_flight() -> StepOrderError:
    """Return the error of `zero_grad()` while gradients are being reduced."""
    return StepOrderError(
        "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
        "optimizer.synchronize(). This is prohibited as it can cause a race condition."
    )
