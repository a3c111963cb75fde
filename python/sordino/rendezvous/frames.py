"""Frames of the rendezvous at the launcher: a head (JSON) and a payload, after the lengths of both."""

from __future__ import annotations

import json
import struct
from typing import Any

_LENGTHS = struct.Struct("!II")


class Frames:
    """Received bytes of one connection, until they are complete frames."""

    def __init__(self) -> None:
        self._held = b""

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._held += data

    def next(self, most: int | None = None) -> tuple[dict[str, Any], bytes] | None:
        """Return the next frame; None if it is not complete yet.

        Args:
            most: largest size of a frame in bytes; None: no limit.

        Raises:
            ValueError: the frame is larger, or has no head.
        """
        if len(self._held) < _LENGTHS.size:
            return None
        head, payload = _LENGTHS.unpack_from(self._held)
        if most is not None and head + payload > most:
            raise ValueError("a frame that is longer than the limit")
        middle, end = _LENGTHS.size + head, _LENGTHS.size + head + payload
        if len(self._held) < end:
            return None
        parsed = json.loads(self._held[_LENGTHS.size : middle])
        if not isinstance(parsed, dict):
            raise ValueError("no head")
        found, self._held = self._held[middle:end], self._held[end:]
        return parsed, found


def frame(head: dict[str, Any], payload: bytes) -> bytes:
    """Return a frame as bytes."""
    text = json.dumps(head).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload
