"""Door of a running job: processes that want to join wait here for an answer of the job's first rank.

The launcher passes questions and answers on (rendezvous/sockets.py has the frames). It does not decide anything.

| newcomer | launcher | first rank |
|---|---|---|
| knock, with its introduction | keeps it | |
| | sends the introductions | asks who waits |
| invited, with the plan of the next world; or refused, with the reason | passes it on | answers one of them |
| over | when no process is left but newcomers that wait | |
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Say = Callable[[dict[str, Any], bytes], None]


class Verdict(Enum):
    """Answer to a newcomer."""

    INVITED = "invited"
    REFUSED = "refused"
    OVER = "over"


@dataclass
class Door:
    """Launcher's side: the newcomers that wait, by their numbers, with a function that sends to them."""

    waiting: dict[int, tuple[Say, bytes]] = field(default_factory=dict)

    def take(self, number: int, say: Say, head: dict[str, Any], payload: bytes) -> None:
        """Handle a frame of process `number`. ValueError, KeyError or TypeError if it is malformed."""
        what = head["door"]
        if what == "knock":
            self.waiting[number] = say, payload
        elif what == "who":
            named = [[one, introduction.decode(errors="replace")] for one, (_, introduction) in self.waiting.items()]
            say({}, json.dumps(named).encode())
        else:
            verdict, to = Verdict(what), self.waiting.pop(int(head["to"]), None)
            if to is not None:
                to[0]({"verdict": verdict.value}, payload)

    def left(self, number: int) -> None:
        """Note that a process has gone."""
        self.waiting.pop(number, None)

    def close(self) -> None:
        """Tell the newcomers that the job is over."""
        for say, _ in self.waiting.values():
            say({"verdict": Verdict.OVER.value}, b"")
        self.waiting.clear()
