"""Emulated hosts on one Linux machine: namespaces joined by links of a chosen rate.

All hosts of a cluster are in the process namespace of the head. Its first process reads a pipe from this process, so it
ends when this process ends for any reason. Then the kernel ends all other processes of the namespace. Network
namespaces, links, host names, shared memory and session files belong to these processes alone and disappear with the
last one. None of them has a name outside. So no cleanup is needed, and clusters disturb no other programs.

The head holds the switch. A host has its own process namespace (in the head's), /proc and /dev/shm. So a rank cannot
use the memory or the process id of a rank on another host, as between real machines.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from sordino.errors import NotBuilt, UsageError

Rates = float | Sequence[float | None] | None

_MOST_HOSTS = 200  # they share one /24
_NAMESPACES = ("--mount-proc", "--pid", "--fork", "--kill-child", "--net", "--uts", "--ipc")

# A process namespace ends with its first process. Its /dev/shm is private, so files of a killed job disappear with it.
_HEAD = """
mount -t tmpfs tmpfs /dev/shm && echo head > /proc/sys/kernel/hostname && cat > /dev/shm/hosts <<END &&
{addresses}
END
mount --bind /dev/shm/hosts /etc/hosts && echo ready && read -r _
"""
_HOST = 'mount -t tmpfs tmpfs /dev/shm && echo "$0" > /proc/sys/kernel/hostname && echo ready && exec sleep infinity'


@dataclass(frozen=True)
class Traffic:
    """Bytes over a host's link so far, Ethernet headers included."""

    sent: int
    received: int


class Hosts:
    """Hosts `node0`, `node1`, … that exist until the context ends.

    Attributes:
        names: names of the hosts.

    Args:
        hosts: number of hosts.
        mbps: rate of each host's link in each direction, in megabits per second: one for all hosts or one per host;
            None: unlimited.

    Raises:
        UsageError: the arguments are out of range.
        NotBuilt: on entering the context, if this machine or this user cannot make hosts. The message names the reason.
    """

    def __init__(self, hosts: int, mbps: Rates = None) -> None:
        if not 1 <= hosts <= _MOST_HOSTS:
            raise UsageError(f"{hosts} hosts: a cluster has between 1 and {_MOST_HOSTS}")
        rates = list(mbps) if isinstance(mbps, Sequence) else [mbps] * hosts
        if len(rates) != hosts:
            raise UsageError(f"{len(rates)} rates for {hosts} hosts: give one for each, or one for all")
        for rate in rates:
            if rate is not None and not 1 <= rate <= 100_000:
                raise UsageError(f"{rate:g} Mbps: a link has between 1 and 100000")
        self.names = [f"node{k}" for k in range(hosts)]
        self._mbps = rates
        self._head: subprocess.Popen[str] | None = None
        self._hosts: list[subprocess.Popen[str]] = []
        self._pids: list[int] = []  # ids, within the head, of the processes that hold the hosts' namespaces

    def __enter__(self) -> Hosts:
        _require_tools()
        try:
            self._start_head()
            self._pids = [self._start_host(name) for name in self.names]
            for k, pid in enumerate(self._pids):
                self._link(k, pid)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the hosts and wait until they are gone."""
        if self._head is not None:
            self._head.communicate("\n")  # a line, because a fork of this process may keep the pipe open
            self._head = None
        while self._hosts:
            self._hosts.pop().communicate()

    # ---- commands ----------------------------------------------------------------------------------------------

    def to_head(self) -> list[str]:
        """Return the words that, before a command, run it in the head. UsageError if the hosts do not exist."""
        if self._head is None:
            raise UsageError("the cluster is not open; use it as `with Cluster(…) as cluster`")
        return [*_enter(str(self._head.pid)), "--"]

    def to_host(self, k: int) -> list[str]:
        """Return the words that, before a command in the head, run it on host `k`."""
        return [*_enter(str(self._pids[k])), "--"]

    def do(self, *words: str, given: str = "") -> str:
        """Run a command in the head with the input `given`; return its output. NotBuilt if it fails."""
        done = subprocess.run([*self.to_head(), *words], input=given, capture_output=True, text=True)
        if done.returncode:
            raise NotBuilt(
                f"`{' '.join(words)}` failed: {_last_line(done.stderr)}. A cluster needs CAP_NET_ADMIN (a container: "
                "--privileged) and a kernel with bridge, veth and sch_tbf (`modprobe -a bridge veth sch_tbf`)"
            )
        return done.stdout

    # ---- links -------------------------------------------------------------------------------------------------

    def cut(self, host: str, is_cut: bool = True) -> None:
        """Disconnect a host from the switch, or connect it again."""
        self.do("ip", "link", "set", host, "down" if is_cut else "up")

    def part(self, hosts: Sequence[str]) -> None:
        """Move these hosts to a second switch, so that they reach only each other."""
        self.do("ip", "link", "add", "switch2", "type", "bridge")
        self.do("ip", "link", "set", "switch2", "up")
        for host in hosts:
            self.do("ip", "link", "set", host, "master", "switch2")

    def traffic(self) -> dict[str, Traffic]:
        """Return the bytes that each host has sent and received so far, by the counters of the switch."""
        found = {}
        for link in json.loads(self.do("ip", "-json", "-statistics", "link", "show", "type", "veth")):
            stats = link["stats64"]
            found[link["ifname"]] = Traffic(sent=stats["rx"]["bytes"], received=stats["tx"]["bytes"])
        return {name: found[name] for name in self.names}

    # ---- the start ---------------------------------------------------------------------------------------------

    def _start_head(self) -> None:
        addresses = "\n".join(["127.0.0.1 localhost", *(f"{address(k)} {name}" for k, name in enumerate(self.names))])
        self._head = _start(["unshare", *_NAMESPACES, "sh", "-c", _HEAD.format(addresses=addresses)])
        _expect(self._head)
        self.do("ip", "link", "set", "lo", "up")
        self.do("ip", "link", "add", "switch", "type", "bridge")
        self.do("ip", "address", "add", f"{address(_MOST_HOSTS)}/24", "dev", "switch")
        self.do("ip", "link", "set", "switch", "up")

    def _start_host(self, name: str) -> int:
        """Start a host; return the id, within the head, of the process that holds its namespaces."""
        inner = ["unshare", *_NAMESPACES, "sh", "-c", _HOST, name]
        host = _start([*self.to_head(), "sh", "-c", 'echo $$; exec "$@"', "sh", *inner])
        self._hosts.append(host)
        pid = int(_expect(host))
        _expect(host)
        return pid

    def _link(self, k: int, pid: int) -> None:
        """Connect host `k` to the switch by a veth pair: `eth0` at the host, and the host's name at the head."""
        name, rate, there = self.names[k], self._mbps[k], self.to_host(k)
        self.do("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self.do("ip", "link", "set", name, "master", "switch", "up")
        self.do(*there, "ip", "address", "add", f"{address(k)}/24", "dev", "eth0")
        self.do(*there, "ip", "link", "set", "lo", "up")
        self.do(*there, "ip", "link", "set", "eth0", "up")
        if rate is not None:
            # A queueing discipline acts on outgoing packets, so each direction is limited at its sending end.
            self.do("tc", "qdisc", "add", "dev", name, "root", "tbf", *_bucket(rate))
            self.do(*there, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *_bucket(rate))


def address(k: int) -> str:
    """Return the address of host `k`."""
    return f"10.0.0.{k + 1}"


def _require_tools() -> None:
    """Raise NotBuilt if this machine or this user cannot make a cluster."""
    if os.geteuid() != 0:
        raise NotBuilt("a cluster is made of network namespaces, which needs root: run this with sudo")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            raise NotBuilt(f"a cluster needs `{tool}`, which is not on PATH: apt-get install {package}")


def _start(words: list[str]) -> subprocess.Popen[str]:
    # In its own session: otherwise Ctrl-C at a terminal would end it before the job, and the output would be lost.
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def _expect(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process writes. NotBuilt, with the last line of its errors, if it has ended."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    if not line:
        raise NotBuilt(
            f"this root may not make namespaces ({_last_line(process.stderr.read())}); start the container with "
            "--privileged, or use a kernel that has CONFIG_PID_NS, NET_NS, UTS_NS and IPC_NS"
        )
    return line


def _enter(pid: str) -> list[str]:
    """Return the nsenter command for the namespaces that `unshare` with this process id made.

    The process itself is not in its process namespace; only its children are.
    """
    return [
        "nsenter", "--target", pid, "--mount", "--net", "--uts", "--ipc", f"--pid=/proc/{pid}/ns/pid_for_children"
    ]  # fmt: skip


def _bucket(mbps: float) -> list[str]:
    """Return tbf's parameters.

    After a pause a whole burst passes at once, so a burst should be small. But tbf wakes late on a busy machine, and
    then catches up by at most one burst. The bytes of a millisecond are a compromise; less than 16 KiB would cut the
    kernel's packets too small. The queue is long enough for several TCP windows: links between training machines lose
    almost nothing, and a lost packet at the end of a message costs TCP 0.2 s.
    """
    burst = max(16 << 10, int(mbps * 1e6 / 8 * 1e-3))
    return ["rate", f"{int(mbps * 1e6)}bit", "burst", str(burst), "limit", str(32 << 20)]


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
