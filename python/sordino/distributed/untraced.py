"""Functions that `torch.compile` leaves alone: it neither traces them nor compiles the functions that they call.

torch calls the process group and its work from C++ and from Python, also while a compiled function runs, such as
`torch.compile(DistributedDataParallel(model))`. Without this mark Dynamo would compile each Python function that is
called then, and fail at the attributes of a process group, because they are not constants.

`torch.compiler.disable` does the same, but loads Dynamo, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])

_frames: Any = eval_frame


def untraced(function: Function) -> Function:
    """Return the function itself, which `torch.compile` leaves alone from now on.

    With PyTorch before 2.7, Dynamo compiles what the function calls, as it does with any other code.
    """
    marked: Any = function
    marked._torchdynamo_disable = True  # not traced by Dynamo when it traces the caller
    if hasattr(_frames, "set_code_exec_strategy"):  # not compiled when the interpreter, or C++, calls it
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(marked.__code__, _frames._FrameExecStrategy(skip, skip))
    return function
