"""Support for calls of `torch.distributed.checkpoint.state_dict` with a wrapped optimizer.

`get_state_dict` and `set_state_dict` support only torch's own optimizers. They

- call `step()` with zero gradients and a learning rate of 0, to make the state of an optimizer that has none;
- keep only "state" and "param_groups" of `state_dict()`, and rename the parameters in both;
- read a flattened state by the keys of each group in `optimizer.param_groups`, and by the keys of `optimizer.state`.

These calls do not identify themselves, and each needs another answer than a call by a script. So they are recognized by
the calling function on the stack. The state of an algorithm travels as bytes in the first group with parameters,
because a torch checkpoint can load a bytes value of any size.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch

from sordino.errors import UsageError

KEY = "sordino"
MODULE = "torch.distributed.checkpoint.state_dict"
"""Module that a program imports to use torch's checkpoints. Callers check first whether it is loaded."""
FUNCTIONS = ("_init_optim_state", "_unflatten_optim_state_dict", "_get_optim_state_dict")
"""Functions of that module that are recognized. A test fails if torch has other ones."""
_NEAR = 8  # maximum number of frames to the caller: a scheduler wraps step()
_REPEATED = 1 << 20  # bytes of a state that may be written once for each parameter


def _call_by(function: str) -> FrameType | None:
    """Return the frame of this function of torch's module, if it is among the last callers; else None."""
    if MODULE not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_NEAR):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == MODULE and frame.f_code.co_name == function:
            return frame
        frame = frame.f_back
    return None


def makes_state() -> bool:
    """Return whether the current call is a step that only creates the optimizer's state."""
    return _call_by("_init_optim_state") is not None


def with_key(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parameter groups in the form that the caller needs.

    If it reads a flattened state that has an algorithm's own state, a group has the key of that state.
    """
    frame = _call_by("_unflatten_optim_state_dict")
    if frame is None or not any(key.endswith(f".{KEY}") for key in frame.f_locals.get("state_dict", ())):
        return groups
    return _with(b"", groups)


def _with(data: bytes, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return these groups with `data` in the first group that has parameters, as torch drops groups without."""
    place = next((number for number, group in enumerate(groups) if group["params"]), 0)
    return [*groups[:place], {**groups[place], KEY: data}, *groups[place + 1 :]]


class _SavedNames:
    """Names of the values in a flattened state, by parameter."""

    def __init__(self, saved: Iterable[str], names: Mapping[Any, Any]) -> None:
        self._saved, self._names = list(saved), names

    def __getitem__(self, parameter: torch.Tensor) -> set[str]:
        prefixes = [f"state.{name}." for name in self._names[parameter]]
        rests = (key[len(prefix) :] for prefix in prefixes for key in self._saved if key.startswith(prefix))
        return {rest.partition(".")[0] for rest in rests}


def with_names(state: Any) -> Any:
    """Return the state of an optimizer of which this rank has a part, in the form that the caller needs.

    A caller that reads a flattened state gets the names of the values from there, because this rank has no values for
    most parameters.
    """
    frame = _call_by("_unflatten_optim_state_dict")
    if frame is None:
        return state
    return _SavedNames(frame.f_locals["state_dict"], frame.f_locals["info"].fqn_param_mapping)


def pack(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a wrapped optimizer in the form that the caller needs.

    Args:
        state: the state, with the algorithm's own state under "sordino".

    Raises:
        UsageError: a flattened checkpoint would hold a large state once for each parameter.
    """
    frame = _call_by("_get_optim_state_dict")
    groups = state["param_groups"]
    if frame is None or not groups:
        return state
    buffer = io.BytesIO()
    torch.save(state[KEY], buffer)
    data = buffer.getvalue()
    flat = getattr(frame.f_locals.get("info"), "flatten_optimizer_state_dict", False)
    if flat and len(data) > _REPEATED:
        raise UsageError(
            f"flatten_optimizer_state_dict=True would write the state of {state[KEY]['algorithm']}, "
            f"{len(data) / 1e6:.1f} MB, once for each parameter. Use flatten_optimizer_state_dict=False"
        )
    return {**state, "param_groups": _with(data, groups)}


def unpack(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the wrapped optimizer's part of a state, and the algorithm's part or None."""
    inner = {key: value for key, value in state.items() if key != KEY}
    own = state.get(KEY)
    packed = next((group[KEY] for group in inner.get("param_groups", ()) if group.get(KEY)), None)
    if own is None and packed is not None:
        own = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    if any(KEY in group for group in inner.get("param_groups", ())):
        inner["param_groups"] = [
            {key: value for key, value in group.items() if key != KEY} for group in inner["param_groups"]
        ]
    return inner, own
