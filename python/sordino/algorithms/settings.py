"""An algorithm's settings from the words of a command line: `--set NAME=VALUE`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from sordino.algorithms.local import AdaptiveInterval
from sordino.algorithms.skipping import ThresholdScheduler
from sordino.errors import UsageError

T = TypeVar("T")

_Part = type[AdaptiveInterval] | type[ThresholdScheduler]
_PARTS: dict[str, _Part] = {"adaptive": AdaptiveInterval, "scheduler": ThresholdScheduler}


def configured(kind: type[T], name: str, texts: Sequence[str], **others: Any) -> T:
    """An algorithm of this kind.

    Args:
        name: by which the user called it.
        texts: NAME=VALUE; a value is a Python literal, or else a word such as blocks.
        others: settings that `texts` may overrule.

    Raises:
        UsageError: it has no such setting, or not with this value.
    """
    known = [setting.name for setting in fields(kind)]  # type: ignore[arg-type]
    settings: dict[str, Any] = dict(others)
    for text in texts:
        setting, _, value = text.partition("=")
        if setting not in known:
            raise UsageError(f"--set {text}: {name} has no setting {setting}; it has: {', '.join(known)}")
        try:
            settings[setting] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # all that it may raise
            settings[setting] = value
        if setting in _PARTS and isinstance(settings[setting], dict):
            settings[setting] = _part(setting, settings[setting])
    return kind(**settings)


def _part(name: str, settings: dict[str, Any]) -> AdaptiveInterval | ThresholdScheduler:
    try:
        made = _PARTS[name](**settings)
    except TypeError as error:
        known = ", ".join(setting.name for setting in fields(_PARTS[name]))
        raise UsageError(f"--set {name}={settings}: {error}; there are: {known}") from error
    return made
