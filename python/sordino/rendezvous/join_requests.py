"""Requests of processes that want to join a running job, and the answers of its first rank.

Ranks and newcomers use an `Admission`, at the launcher's socket (sockets.py) or a store (store_admission.py). The
launcher only passes questions and answers on; `JoinRequests` is its side:

| newcomer | launcher | first rank |
|---|---|---|
| asks to join, with its introduction | keeps it | |
| | tells whether a process waits, or sends the introductions | asks for that |
| invited, with the plan of the next world; or refused, with the reason | passes it on | answers one of them |
| told that the job is over | when only waiting newcomers are left | |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

Say = Callable[[dict[str, Any], bytes], None]


class Verdict(Enum):
    """Answer to a newcomer."""

    INVITED = "invited"
    REFUSED = "refused"
    OVER = "over"


@runtime_checkable
class Admission(Protocol):
    """Rendezvous at which processes can join a running job, and its ranks agree to let them in."""

    def gather(self, key: str, ranks: Sequence[int], mine: bytes, timeout: float | None = None) -> list[bytes]:
        """Return the values of these ranks for this key, in the order of `ranks`. Collective over them."""

    def vote(self, key: str, ranks: Sequence[int], agrees: bool, seconds: float) -> bool:
        """Return whether all these ranks have agreed. All of them get the same answer. Collective over them."""

    def waits(self) -> bool:
        """Return whether a process waits to join."""

    def newcomers(self) -> list[tuple[int, bytes]]:
        """Return the processes that want to join the job: their numbers and introductions."""

    def answer(self, newcomer: int, verdict: Verdict, text: bytes) -> None:
        """Answer a newcomer, with the plan of the next world or the reason of the refusal."""

    def ask_to_join(self, introduction: bytes, warning: float) -> tuple[Verdict, bytes]:
        """Ask to join the job. Return the verdict, and the plan or the reason."""


@dataclass
class JoinRequests:
    """Launcher's side: the newcomers that wait, by their numbers, with a function that sends to them."""

    waiting: dict[int, tuple[Say, bytes]] = field(default_factory=dict)

    def take(self, number: int, say: Say, head: dict[str, Any], payload: bytes) -> None:
        """Handle a frame of process `number`. Raises ValueError, KeyError or TypeError if it is malformed."""
        what = head["join"]
        if what == "ask":
            self.waiting[number] = say, payload
        elif what == "any":
            say({"waiting": len(self.waiting)}, b"")
        elif what == "who":
            named = [[one, introduction.decode(errors="replace")] for one, (_, introduction) in self.waiting.items()]
            say({}, json.dumps(named).encode())
        else:
            verdict, to = Verdict(what), self.waiting.pop(int(head["to"]), None)
            if to is not None:
                to[0]({"verdict": verdict.value}, payload)

    def left(self, number: int) -> None:
        """Note that a process has ended."""
        self.waiting.pop(number, None)

    def close(self) -> None:
        """Tell the newcomers that the job is over."""
        for say, _ in self.waiting.values():
            say({"verdict": Verdict.OVER.value}, b"")
        self.waiting.clear()
