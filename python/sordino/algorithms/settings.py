"""Settings of an algorithm from a command line: `--set NAME=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from sordino.algorithms.base import Algorithm
from sordino.errors import UsageError
from sordino.literals import literal

T = TypeVar("T", bound=Algorithm)


def configured(cls: type[T], name: str, texts: Sequence[str], **others: Any) -> T:
    """Return an algorithm with the given settings.

    Args:
        cls: the class of the algorithm.
        name: the name by which the user chose it, for errors.
        texts: strings NAME=VALUE. A value is a Python literal, or else a word such as blocks.
        others: settings that `texts` overrides.

    Raises:
        UsageError: the algorithm has no such setting, or refuses the value; or a setting is given twice.
    """
    known = [setting.name for setting in fields(cls)]  # type: ignore[arg-type]
    settings: dict[str, Any] = dict(others)
    for text in texts:
        setting, _, value = text.partition("=")
        if setting not in known:
            raise UsageError(f"--set {text}: {name} has no setting {setting}; it has: {', '.join(known)}")
        if sum(other.partition("=")[0] == setting for other in texts) > 1:
            raise UsageError(f"--set {text}: {setting} is given twice; omit one")
        try:
            settings[setting] = literal(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # everything that it can raise
            settings[setting] = value
        if setting in cls.parts and isinstance(settings[setting], dict):
            settings[setting] = _part(cls.parts[setting], setting, settings[setting])
    return cls(**settings)


def _part(cls: type, name: str, settings: dict[str, Any]) -> Any:
    try:
        return cls(**settings)
    except TypeError as error:
        known = ", ".join(setting.name for setting in fields(cls))
        raise UsageError(f"--set {name}={settings}: {error}; use some of {known}") from error
