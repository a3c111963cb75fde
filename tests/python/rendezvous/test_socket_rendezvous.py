"""The meeting place of ranks that `sordino run` has started: it answers ranks of the job, and strangers change
nothing."""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.errors import PeerLost, Timeout, TransportError
from sordino.rendezvous.frames import frame
from sordino.rendezvous.server import RendezvousServer
from sordino.rendezvous.sockets import SocketRendezvous

TOKEN = b"t" * 64


class Launcher(threading.Thread):
    """The launcher's loop, with a way to tell it that a rank has ended."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.path = folder / "meet"
        self.events = selectors.DefaultSelector()
        self.server = RendezvousServer(self.path, TOKEN, self.events, 4)
        self.orders, self._orders = socket.socketpair()
        self.events.register(self._orders, selectors.EVENT_READ, self.take_order)
        self.over = False

    def run(self) -> None:
        while not self.over:
            for key, _ in self.events.select():
                key.data()
        self.server.close()

    def take_order(self) -> None:
        order = self._orders.recv(1)
        if order == b"\xff":
            self.over = True
        else:
            self.server.left(order[0])

    def end(self) -> None:
        self.orders.send(b"\xff")
        self.join(10)

    def rank(self, number: int, timeout: float = 30.0, token: bytes = TOKEN) -> SocketRendezvous:
        return SocketRendezvous(str(self.path), token, number, timeout)


def meet(launcher: Launcher, ranks: list[int], rounds: int) -> None:
    """Let all of them meet in threads; check that each sees the data of all."""
    shown: dict[int, list[list[bytes]]] = {}

    def come(number: int) -> None:
        rank = launcher.rank(number)
        shown[number] = [rank.gather(f"{turn}", ranks, f"{turn} of {number}".encode()) for turn in range(rounds)]

    threads = [threading.Thread(target=come, args=(number,)) for number in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    wanted = [[f"{turn} of {number}".encode() for number in ranks] for turn in range(rounds)]
    assert shown == dict.fromkeys(ranks, wanted)


def test_all_see_what_all_have_shown(launcher_of_ranks: Launcher) -> None:
    meet(launcher_of_ranks, [0, 1, 2], 3)
    meet(launcher_of_ranks, [2, 0], 1)  # some of them, in another order, under a used name
    meet(launcher_of_ranks, [0, 1, 2], 1)


def test_large_things_are_shown_whole(launcher_of_ranks: Launcher) -> None:
    ranks = [launcher_of_ranks.rank(number) for number in range(2)]
    large = os.urandom(700_000)
    other = threading.Thread(target=lambda: ranks[1].gather("x", [0, 1], b""))
    other.start()
    assert ranks[0].gather("x", [0, 1], large) == [large, b""]
    other.join(30)


def test_who_waits_for_one_that_has_ended_is_told(launcher_of_ranks: Launcher) -> None:
    rank = launcher_of_ranks.rank(0)
    threading.Timer(0.1, lambda: launcher_of_ranks.orders.send(b"\x01")).start()
    with pytest.raises(PeerLost, match="rank 1 ended before all ranks had met") as caught:
        rank.gather("x", [0, 1, 2], b"")
    assert caught.value.ranks == (1,)
    with pytest.raises(PeerLost):  # later ranks fail in the same way
        launcher_of_ranks.rank(2).gather("x", [0, 1, 2], b"")
    assert rank.gather("y", [0], b"me") == [b"me"]  # the remaining ranks may meet


def test_who_does_not_come_is_named(launcher_of_ranks: Launcher) -> None:
    with pytest.raises(Timeout, match=r"waited 0\.2 s for ranks 0, 2 to call init\(\)") as caught:
        launcher_of_ranks.rank(1, timeout=0.2).gather("x", [0, 1, 2], b"")
    assert caught.value.missing == (0, 2)


def test_a_launcher_that_is_gone_is_said(launcher_of_ranks: Launcher) -> None:
    rank = launcher_of_ranks.rank(0)
    threading.Timer(0.1, launcher_of_ranks.end).start()
    with pytest.raises(TransportError, match="the launcher that started this rank is gone"):
        rank.gather("x", [0, 1], b"")
    os.unlink(launcher_of_ranks.path)
    with pytest.raises(TransportError, match="does not answer"):
        launcher_of_ranks.rank(0)


def hung_up_on(launcher: Launcher, data: bytes) -> bool:
    """Return whether the launcher closes a connection on which `data` is sent."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(launcher.path))
        stranger.settimeout(10)
        try:
            stranger.sendall(data)
            return stranger.recv(1) == b""
        except ConnectionError:
            return True


ROUND = frame({"key": "0", "ranks": [0, 1]}, b"forged")
STRANGERS = {
    "another job's token": frame({"rank": 0}, b"x" * 64) + ROUND,
    "no token": frame({"rank": 0}, b"") + ROUND,
    "half of it": frame({"rank": 0}, TOKEN[:-1]) + ROUND,
    "more than a stranger may say": frame({"rank": 0, "more": "x" * 2000}, TOKEN),
    "noise": b"\0\0\0\4\0\0\0\0noise...",
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no object": b"\0\0\0\4\0\0\0\0[[]]",
    "deep": b"\0\0\3\xe8\0\0\0\0" + b"[" * 1000,
    "a rank's round of others": frame({"rank": 5}, TOKEN) + ROUND,
    "ranks that are none": frame({"rank": 0}, TOKEN) + frame({"key": "0", "ranks": ["a"]}, b""),
    "endless": frame({"rank": 0}, TOKEN) + b"\xff" * 8,
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_hung_up_on_and_change_nothing(launcher_of_ranks: Launcher, data: bytes) -> None:
    assert hung_up_on(launcher_of_ranks, data)
    meet(launcher_of_ranks, [0, 1], 2)


@given(noise=st.lists(st.binary(max_size=200), max_size=5))
def test_noise_changes_nothing(tmp_path_factory: pytest.TempPathFactory, noise: list[bytes]) -> None:
    launcher = Launcher(tmp_path_factory.mktemp("noise"))
    launcher.start()
    for data in noise:  # also on connections that stay open
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(launcher.path))
            stranger.sendall(data)
    meet(launcher, [0, 1], 1)
    launcher.end()


def test_heads_are_json_and_payloads_are_bytes() -> None:
    found = frame({"a": 1}, b"\xff")
    assert json.loads(found[8:-1]) == {"a": 1} and found[-1:] == b"\xff"
