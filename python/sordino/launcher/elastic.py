"""Elastic job: its processes run on the hosts that a user's script names, and follow changes of that list.

This process opens the store at which they meet (rendezvous/store_admission.py), so the job survives the loss of any of
its processes. Each runs under an agent (agent.py) on its host. The ranks themselves continue without lost ranks, and
let newcomers in at their next commit. So this launcher only starts and ends processes:

| event | reaction |
|---|---|
| the hosts have `start` slots | the processes start: one per slot, at most `most` |
| a slot has no process, and the ranks have met | a process starts there and joins, up to `most` |
| a process fails before the ranks have met | the job ends with its status |
| a process fails later | its host gets no process for a moment if the process has not lived long |
| a host or slot is gone | its process gets SIGTERM, and SIGKILL `grace` seconds later |
| for `patience` seconds, fewer than `least` processes run | the job ends with status 1 |
| a process ends with status 0 by itself | it has left, or finished before others: no process starts for 5 s |
| the first rank has written that the job is over | no process starts any more |
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.awake import AwakeClock
from sordino.launcher import agent, descriptors
from sordino.launcher.discovery import Cooldowns, Discovery, Slot, free, surplus
from sordino.launcher.outcomes import signal_name, signal_of
from sordino.launcher.processes import Ended, StopSignals, subreaper
from sordino.launcher.ranks import Rank
from sordino.rendezvous.environment import ADDRESS, MIN_RANKS, NEWCOMER, ON_PEER_LOST, PORT, RANK_VARIABLES, TOKEN
from sordino.rendezvous.store_admission import StoreAdmission, latest_job

SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=10"
_LOOK_S = 0.05
_SAY_S = 0.3  # from a failure that ends the job to SIGTERM, so that the others can print their errors
_GRACE_S = 1.0  # from SIGTERM to SIGKILL
_LEFT_S = 5.0  # after a process has ended with status 0; the others may be about to finish, too
_DEADLINE_S = 60.0  # time limit of the store, which is in this process
FILES_PER_PROCESS, OTHER_FILES = 4, 64
"""Maximum numbers of open files of the launcher."""
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Limits:
    """Limits of an elastic job.

    Attributes:
        start: slots that must be there before the job begins.
        least: number of ranks below which training waits.
        most: largest number of processes.
        patience: seconds to wait for slots.
    """

    start: int
    least: int
    most: int
    patience: float


@dataclass
class _Process:
    """A process of the job: its agent, or the ssh that leads to it."""

    slot: Slot
    rank: Rank
    orders: int  # descriptor of the agent's stdin
    started: float
    kill_at: float | None = None  # set when it has been asked to leave

    def send(self, number: int) -> None:
        """Send it a signal. SIGKILL also ends an agent or an ssh that does not answer."""
        with contextlib.suppress(OSError):
            os.write(self.orders, f"{int(number)}\n".encode())
        if number == signal.SIGKILL:
            self.rank.process.kill()


class ElasticJob:
    """Processes of one start.

    Args:
        words: command of each process.
        environment: environment of the processes on this machine.
        exported: variables for those on other hosts, added to the environment that ssh gives them.
        discovery: source of the hosts.
        limits: numbers of processes.
        grace: seconds from SIGTERM to SIGKILL for processes whose host is gone.
        ssh: command that runs another command on the host whose name follows.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        exported: Mapping[str, str],
        discovery: Discovery,
        limits: Limits,
        grace: float,
        ssh: str = SSH,
    ) -> None:
        import torch.distributed as dist  # the import takes seconds, so it is done only if needed

        self._words, self._environment, self._exported = list(words), dict(environment), dict(exported)
        self._discovery, self._limits, self._grace, self._ssh = discovery, limits, grace, shlex.split(ssh)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "0.0.0.0", 0, is_master=True, wait_for_workers=False
        )
        self._token = secrets.token_hex(32)
        self._names = {*_LOCAL, socket.gethostname(), socket.getfqdn()}  # of this machine
        self._events = selectors.DefaultSelector()
        self._stop = StopSignals()  # replaced by the argument of `run`
        self._clock = AwakeClock()
        self._living: dict[int, _Process] = {}  # by number of the start
        self._started = 0
        self._size = 0  # number of ranks with which the job has begun
        self._met = False
        self._ended_well: float | None = None  # when a process last ended with status 0 by itself
        self._failures: list[tuple[str, int]] = []  # description and status of failed processes that were not replaced
        self._lost = 0  # number of processes that have failed
        self._cooldowns = Cooldowns()
        self._short_since: float | None = None  # when there were too few slots or processes
        self._ends: list[tuple[float, int]] | None = None  # times of signals to the remaining processes
        self._verdict = ""  # reason for which this launcher has ended the job

    def run(self, stop: StopSignals) -> Ended:
        """Run the job to its end. No process of it remains on this machine, nor on hosts that can be reached."""
        self._stop = stop
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            needed = FILES_PER_PROCESS * self._limits.most + OTHER_FILES
            stack.enter_context(descriptors.allowed(needed, f"{self._limits.most} processes"))
            reap = stack.enter_context(subreaper())
            stack.enter_context(stop.to(self._send))
            while not self._over(stop):
                if problem := self._discovery.look():
                    descriptors.say(f"--host-discovery-script: {problem}; the known hosts stay")
                if not stop.received and self._ends is None:
                    self._follow_hosts()
                self._wait()
                reap([*self._discovery.running(), *(one.rank.process.pid for one in self._living.values())])
                self._send_due()
        stopped = stop.received[0] if stop.received else 0
        status, why = self._judged()
        if stopped and status != 0:
            return Ended(128 + stopped, stopped)
        if why:
            descriptors.say(why)
        return Ended(status, stopped, why=why)

    def _over(self, stop: StopSignals) -> bool:
        return not self._living and bool(self._started or stop.received or self._verdict)

    def _judged(self) -> tuple[int, str]:
        if self._is_over():
            lost = f"{_processes(self._lost)} failed; the others finished" if self._lost else ""
            return 0, lost
        if self._verdict:
            return 1, self._verdict
        if self._failures:
            text, status = self._failures[0]
            return status, f"{text} and was the first to fail"
        if self._ended_well is not None:
            return 0, ""
        return 1, "all processes have left, and the job is not over"

    def _is_over(self) -> bool:
        """Return whether the first rank has written that the job is over."""
        if not self._met:
            return False
        prefix, token = latest_job(self._store), self._token.encode()
        return StoreAdmission(self._store, prefix, 0, token, _DEADLINE_S, _DEADLINE_S).is_over()

    # ---- following the hosts

    def _follow_hosts(self) -> None:
        now, taken = self._clock.now(), [one.slot for one in self._living.values()]
        hosts = self._discovery.hosts
        slots = free(hosts, taken, self._cooldowns, now)
        if not self._started:
            if len(slots) >= self._limits.start:
                self._begin(slots[: self._limits.most])
            else:
                self._wait_for_more(now, f"{_slots(len(slots))} of {self._limits.start} are there", bool(slots))
            return
        if not self._met:
            self._met = latest_job(self._store) != ""
            return
        gone = surplus(hosts, taken)
        for process in self._living.values():
            if process.slot in gone and process.kill_at is None:
                descriptors.say(f"{process.slot.host} has fewer slots; the process there gets SIGTERM")
                process.send(signal.SIGTERM)
                process.kill_at = now + self._grace
            if process.kill_at is not None and now >= process.kill_at:
                process.send(signal.SIGKILL)
        if self._ended_well is not None and (now < self._ended_well + _LEFT_S or self._is_over()):
            return
        staying = sum(process.kill_at is None for process in self._living.values())
        for slot in slots[: self._limits.most - len(self._living)]:
            if self._stop.received:
                break
            descriptors.say(f"a process on {slot.host} joins")
            self._failures = self._failures[1:]
            self._start(slot, None)
            staying += 1
        if staying < self._limits.least:
            self._wait_for_more(now, f"{_processes(staying)} of {self._limits.least} run", True)
        else:
            self._short_since = None

    def _begin(self, slots: Sequence[Slot]) -> None:
        """Start the ranks with which the job begins.

        If one cannot be started, or the job is stopped, the others are not tried.
        """
        self._size, self._short_since = len(slots), None
        hosts = dict.fromkeys(slot.host for slot in slots)
        descriptors.say(f"{_processes(len(slots))} on {', '.join(hosts)}")
        all(not self._stop.received and self._start(slot, number) for number, slot in enumerate(slots))

    def _wait_for_more(self, now: float, what: str, tells: bool) -> None:
        """Note that there are too few slots or processes. End the job if that has lasted too long."""
        if self._short_since is None:
            self._short_since = now
            if tells:
                descriptors.say(f"{what}; waiting for hosts, at most {self._limits.patience:.0f} s")
        elif now - self._short_since > self._limits.patience:
            problem = f" ({self._discovery.problem})" if self._discovery.problem else ""
            self._verdict = (
                f"for {self._limits.patience:.0f} s only {what}. Let --host-discovery-script name more hosts{problem}, "
                "or lower --min-np, or raise --elastic-timeout"
            )
            self._end_all(now)

    # ---- processes

    def _start(self, slot: Slot, rank: int | None) -> bool:
        """Start a process, as a rank of the start or (`rank` None) as a newcomer. Return whether that succeeded."""
        with self._stop.deferred():
            return self._start_now(slot, rank)

    def _start_now(self, slot: Slot, rank: int | None) -> bool:
        is_local = slot.host in self._names
        words = [sys.executable, "-I", "-S", str(Path(agent.__file__))]
        if not is_local:
            words = [*self._ssh, slot.host, "exec " + shlex.join(words)]
        number, self._started = self._started, self._started + 1
        orders_out, orders = os.pipe()
        output, output_in = os.pipe()
        errors, errors_in = os.pipe()
        try:
            process = subprocess.Popen(
                words, env=self._environment, stdin=orders_out, stdout=output_in, stderr=errors_in,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            descriptors.say(f"{words[0]}: {error.strerror}")
            for descriptor in (orders, output, errors):
                os.close(descriptor)
            self._note(slot, 127, 0.0)
            return False
        finally:
            for descriptor in (orders_out, output_in, errors_in):
                os.close(descriptor)
        made = Rank(number, process, self._events, {output: 1, errors: 2})
        self._living[number] = _Process(slot, made, orders, self._clock.now())
        descriptors.write(orders, json.dumps(self._order(slot, rank, is_local)).encode() + b"\n")
        return True

    def _order(self, slot: Slot, rank: int | None, is_local: bool) -> dict[str, Any]:
        """Return the agent's order: program, folder, environment, and slots of the host."""
        address = "127.0.0.1" if is_local else _address_for(slot.host)
        variables: dict[str, str | None] = {} if is_local else dict(self._exported)
        variables |= {"RANK": None, "WORLD_SIZE": None, RANK_VARIABLES: None, NEWCOMER: None}
        if rank is None:
            variables[NEWCOMER] = "1"
        else:
            variables |= {"RANK": str(rank), "WORLD_SIZE": str(self._size)}
        variables |= {
            "LOCAL_RANK": str(slot.number),
            ADDRESS: address,
            PORT: str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            TOKEN: self._token,
            MIN_RANKS: str(self._limits.least),
            ON_PEER_LOST: "continue",
        }
        slots = next((host.slots for host in self._discovery.hosts if host.name == slot.host), 1)
        return {"words": self._words, "folder": os.getcwd(), "environment": variables, "slots": slots}

    def _collect(self, number: int) -> None:
        process = self._living.pop(number)
        process.rank.finish()
        os.close(process.orders)
        status = process.rank.process.wait()
        if status == 0 and process.kill_at is None:
            self._ended_well = self._clock.now()
        elif status != 0 and process.kill_at is None and self._ends is None:
            self._note(process.slot, status, self._clock.now() - process.started)

    def _note(self, slot: Slot, status: int, lived: float) -> None:
        """Note a failure, unless the job was over before."""
        if self._is_over():
            return
        now = self._clock.now()
        status = status if status >= 0 else 128 - status
        by = signal_of(status)
        how = f"was ended by {signal_name(by)}" if by else f"ended with status {status}"
        text = f"the process in slot {slot.number} of {slot.host} {how}"
        self._failures.append((text, status))
        self._lost += 1
        self._cooldowns.failed(slot.host, now, lived)
        if not self._met and not self._stop.received:
            self._end_all(now + _SAY_S)
        elif self._living:
            descriptors.say(text)

    def _end_all(self, at: float) -> None:
        if self._ends is None:
            self._ends = [(at, signal.SIGTERM), (at + _GRACE_S, signal.SIGKILL)]

    def _send_due(self) -> None:
        now = self._clock.now()
        while self._ends and now >= self._ends[0][0]:
            self._send(self._ends.pop(0)[1])

    def _send(self, number: int) -> None:
        for process in list(self._living.values()):
            process.send(number)

    def _wait(self) -> None:
        """Wait for events, at most a moment, and handle them."""
        ended = []
        for key, _ in self._events.select(_LOOK_S):
            if isinstance(key.data, Rank):
                ended.append(key.data.number)
            else:
                key.data()
        for number in ended:
            self._collect(number)

    def _close(self) -> None:
        for process in self._living.values():
            process.rank.close()
            os.close(process.orders)  # the agents end their processes
        self._events.close()


def _address_for(host: str) -> str:
    """Return the address by which a host reaches this machine: that of the interface which leads to the host."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as one:
            one.connect(place)  # sends nothing
            return str(one.getsockname()[0])
    except OSError:
        return socket.gethostname()  # ssh may know the host by a name of its own


def _slots(number: int) -> str:
    return f"{number} slot{'s' * (number != 1)}"


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number != 1)}"
