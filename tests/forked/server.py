"""The fork server: `server.py SOCKET PADDING`. It imports slow modules once, and forks for each client (client.py).

The fork returns from `serve` and becomes the process that the client asked for. At its end threads are joined and the
exit functions of Python and C run, as always. Only the destruction of all modules, which takes half a second with
torch, is left to the kernel.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from client import end_like

Request = dict[str, Any]
_NAMESPACES = {"mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000, "net": 0x40000000}
_PR_SET_PDEATHSIG = 1


def load() -> None:
    """Import the modules that jobs of tests need. This must not start a thread, MPI or a device."""
    # torch would import torch._dynamo with the first optimizer, which takes as long as all other imports.
    for module in ("sklearn.datasets", "torch", "torch._dynamo", "sordino.checkpoint", "sordino.data", "sordino.torch"):
        importlib.import_module(module)

    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would have only one of them"
    gc.collect()
    gc.freeze()


class Server:
    def __init__(self, path: str) -> None:
        self.events = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(socket.SOMAXCONN)
        self.events.register(self.listener, selectors.EVENT_READ, self.accept)
        self.events.register(0, selectors.EVENT_READ, self.stop)
        self.forks: dict[int, int] = {}  # descriptors of living forks, by process number
        self.stopped = False
        self.packages = os.environ.get("PYTHONPATH", "")

    def serve(self) -> Request | None:
        """Return a request in the fork that must fulfill it; return None in the server, at its end."""
        while not self.stopped:
            for key, _ in self.events.select():
                request = key.data(key.fileobj)
                if request is not None:
                    return request
        for fork in self.forks.values():
            signal.pidfd_send_signal(fork, signal.SIGKILL)
        return None

    def stop(self, _: object) -> None:
        """Note that the process that needs this server has ended."""
        self.stopped = True

    def accept(self, listener: socket.socket) -> None:
        """Accept a client. Its request is read as it arrives, as a stopped client must not stop the others."""
        client, _ = listener.accept()
        client.setblocking(False)
        self.events.register(client, selectors.EVENT_READ, Arriving(self).read)

    def fulfil(self, client: socket.socket, streams: list[int], request: Request) -> Request | None:
        """Fork for a client; return its request in the fork. A client that is refused becomes a real Python."""
        try:
            # The client may be in another PID namespace, so the kernel is asked for its number.
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            request["pid"], _, _ = struct.unpack("3i", credentials)
            try:
                request["namespaces"] = foreign_namespaces(request["pid"])
            except OSError:  # the client was killed meanwhile
                request["namespaces"] = {}
            fork = os.fork()
        except OSError as error:
            print(f"the fork server turns a client away: {error}", file=sys.stderr, flush=True)
            client.close()
            return None
        if fork == 0:
            client.setblocking(True)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.closerange(3, 4096)
            return request
        client.setblocking(True)
        self.watch(fork, client, 0 if "pid" in request["namespaces"] else fork)
        return None

    def watch(self, fork: int, client: socket.socket, known_as: int) -> None:
        """Tell the client when the fork ends, and end the fork when the client does."""
        descriptor = os.pidfd_open(fork)
        self.forks[fork] = descriptor

        def ended(_: object) -> None:
            code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
            self.events.unregister(descriptor)
            os.close(self.forks.pop(fork))
            if client.fileno() >= 0:
                self.events.unregister(client)
                tell(client, f"end {code}\n")
                client.close()

        def left(_: object) -> None:
            if client.fileno() < 0:  # the fork has ended at the same time, and that was seen first
                return
            self.events.unregister(client)
            client.close()
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)

        self.events.register(descriptor, selectors.EVENT_READ, ended)
        self.events.register(client, selectors.EVENT_READ, left)
        tell(client, f"pid {known_as}\n")


class Arriving:
    """A client's request, received in parts: 8 bytes with the length, three descriptors, and JSON."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.length = 0
        self.text = b""
        self.streams: list[int] = []

    def read(self, client: socket.socket) -> Request | None:
        """Read the next part; return the request in the fork that must fulfill it."""
        try:
            if not self.length:
                more, self.streams, _, _ = socket.recv_fds(client, 8, 3)
                self.length = int.from_bytes(more, "little") if len(more) == 8 else 0
            else:
                more = client.recv(1 << 20)
                self.text += more
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        gone = not more or not self.length
        if not gone and len(self.text) < self.length:
            return None
        self.server.events.unregister(client)
        fulfilled = None
        request: Request = {} if gone else json.loads(self.text)
        if gone or request["environ"].get("PYTHONPATH", "") != self.server.packages:
            client.close()
        else:
            fulfilled = self.server.fulfil(client, self.streams, request)
        if fulfilled is None:
            for stream in self.streams:
                os.close(stream)
        return fulfilled


def tell(client: socket.socket, line: str) -> None:
    """Send a line to a client that may have ended."""
    with contextlib.suppress(OSError):
        client.sendall(line.encode())


def become(request: Request) -> None:
    """Take the client's place on the machine: namespaces, folder, environment, streams, cores, priority."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    os.sched_setaffinity(0, os.sched_getaffinity(request["pid"]))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, request["pid"]))
    if request["namespaces"]:
        move(request["pid"], request["namespaces"])
    os.chdir(request["folder"])
    environ: dict[str, str] = request["environ"]
    os.environ.clear()
    os.environ.update(environ)
    start, end = stat_fields(48, 50)
    show(start, end, [sys.executable, *request["argv"]])
    start, end = stat_fields(50, 52)
    show(start, end, [f"{name}={value}" for name, value in environ.items()])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        by_line = os.isatty(number) or name == "stderr" or bool(environ.get("PYTHONUNBUFFERED"))
        errors = "backslashreplace" if name == "stderr" else "strict"
        stream = os.fdopen(number, "w" if number else "r", 1 if by_line else -1, "utf-8", errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    random.seed()
    import numpy
    import torch

    numpy.random.seed()
    if environ.get("OMP_NUM_THREADS"):  # the libraries have read it at import
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))


def foreign_namespaces(pid: int) -> dict[str, int]:
    """Return the namespaces of a process that this process is not in."""
    return {
        name: flag
        for name, flag in _NAMESPACES.items()
        if os.readlink(f"/proc/self/ns/{name}") != os.readlink(f"/proc/{pid}/ns/{name}")
    }


def move(pid: int, namespaces: dict[str, int]) -> None:
    """Enter namespaces of another process. Only a child can enter its PID namespace: then this process remains outside,
    and ends as the child does."""
    c = ctypes.CDLL(None, use_errno=True)
    if c.setns(os.pidfd_open(pid), sum(namespaces.values())) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the client's namespaces")
    if "pid" not in namespaces:
        return
    child = os.fork()
    if child:
        end_like(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    c.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def stat_fields(first: int, end: int) -> list[int]:
    """Return the fields from `first` to before `end` of /proc/self/stat, numbered from 1 as in its manual page."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return [int(field) for field in fields[first - 3 : end - 3]]


def show(start: int, end: int, words: list[str]) -> None:
    """Write words into the memory that /proc shows for this process."""
    text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
    room = end - start
    assert len(text) <= room, f"{len(text)} bytes to show, and room for {room}"
    ctypes.memmove(start, text.ljust(room, b"\0"), room)


def run_to_the_end(argv: list[str]) -> None:
    """Run the request and end this process with the status, or by the signal, with which Python would end."""
    code: object = 0
    try:
        try:
            run(argv)
        finally:
            threading._shutdown()  # joins non-daemon threads, as the end of an interpreter does
    except SystemExit as end:
        code = 0 if end.code is None else end.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120  # as Python does
    if int(code) < 0:
        end_like(int(code))
    ctypes.PyDLL(None).exit(int(code) & 0xFF)  # with C's exit functions, where MPI is finalized


def run(argv: list[str]) -> None:
    """Run the request as `python ARGV` would."""
    first, *rest = argv
    if first == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if first == "-c":
        code, name, sys.path[0], sys.argv = rest[0], "<string>", "", ["-c", *rest[1:]]
    else:
        code, name, sys.path[0], sys.argv = Path(first).read_text(), first, str(Path(first).resolve().parent), argv
    module = types.ModuleType("__main__")
    if first != "-c":
        module.__file__ = first
    sys.modules["__main__"] = module
    exec(compile(code, name, "exec"), module.__dict__)


if __name__ == "__main__":
    load()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = Server(sys.argv[1])
    print("ready", flush=True)
    os.dup2(2, 1)
    asked = server.serve()
    if asked is not None:
        try:
            become(asked)
        except ProcessLookupError:  # the client has ended meanwhile
            os._exit(1)
        run_to_the_end(asked["argv"])
