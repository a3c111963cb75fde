"""The outer step of DiLoCo, on the fragments of one rank's parameters.

All ranks hold the same outer parameters and momentum, and change them by the same mean. So these stay equal, bit for
bit, without being sent.

With overlap the mean of a fragment is in flight during some steps: `exchange` begins it, and `apply` finishes it and
takes the outer step. At most one fragment is in flight. Until `apply` has the mean, it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sordino.algorithms.diloco import DiLoCo, fragment_of
from sordino.algorithms.diloco.fragment import Carried, Fragment, elements_of
from sordino.algorithms.gossip.mixing import Peers, is_of, take_from_first
from sordino.runtime.collectives.ops import broadcast_
from sordino.runtime.exchange.flat_buffer import ParameterBuffer
from sordino.runtime.exchange.residuals import Feedback, Sender
from sordino.runtime.exchange.saved_residuals import drop, renumbered


class OuterStep:
    """Mixing of DiLoCo: in each exchange one fragment takes its outer step, or begins it."""

    def __init__(self, peers: Peers, arena: ParameterBuffer, algorithm: DiLoCo) -> None:
        algorithm.check_fragments(max(arena.segment_count, 1))
        self._peers, self._arena, self._algorithm = peers, arena, algorithm
        count = algorithm.fragments
        members = [[run for segment, run in arena.runs if fragment_of(segment, count) == one] for one in range(count)]
        self._fragments = [
            Fragment(peers.context, peers.process_set, runs, f"{peers.name}.{number}", algorithm)
            for number, runs in enumerate(members)
        ]
        for fragment in self._fragments:
            fragment.place(arena)
        self._begun = False
        self._number = peers.context.rank  # this rank's number until the ranks meet again
        self._carried: Carried | None = None  # outer state of some parameters, until `begin`
        self._elements = list(elements_of(arena))
        self._sizes = {one.name: one.whole for one in self._elements}
        self._feedback: Feedback | None = None
        if algorithm.codec is not None:
            sender = Sender.of(peers.context, peers.process_set, algorithm.codec)
            self._feedback = Feedback(sender, f"outer gradients of {algorithm.label}")
            for fragment in self._fragments:
                fragment.attach(self._feedback, self._elements)

    @torch.no_grad()
    def begin(self) -> None:
        """Start from the parameters of the first rank, even if the ranks have different ones.

        Parameters with carried outer state (`carry`) keep this rank's values.
        """
        if self._begun:
            return
        self._arena.adopt()
        self._peers.judge(self._arena.names, self._arena.tensors)
        carried, self._carried = self._carried, None
        if carried is None:
            take_from_first(self._peers, self._arena)
            self.all_are_alike()
            return
        first = (self._peers.process_set.ranks or [0])[0]
        for one in self._elements:
            if one.name not in carried.outer:
                broadcast_(one.values, first, f"{self._peers.name}.begin.{one.name}", self._peers.process_set)
        self.all_are_alike()
        for fragment in self._fragments:
            fragment.take(self._elements, carried)
        self._load_residuals(renumbered(carried.residuals, carried.number, self._peers.context.rank))

    def carried(self) -> Carried | None:
        """Return the outer state by parameter, for an object with other parameters; None before the first step.

        If a loss has interrupted `begin`, it is the state from which `begin` was to continue.
        """
        if not self._begun:
            return self._carried
        carried = Carried({}, {}, self._residuals(), self._number)
        for fragment in self._fragments:
            fragment.give(self._elements, carried)
        return carried

    def carry(self, carried: Carried | None) -> None:
        """Continue in `begin` from the outer state of another object, for the parameters that both have.

        If this object has begun already, nothing changes: a loss has made the models of all ranks equal.
        """
        if not self._begun:
            self._carried = carried

    def _residuals(self) -> dict[str, Any]:
        return {} if self._feedback is None else self._feedback.state()

    def _load_residuals(self, state: dict[str, Any]) -> None:
        if self._feedback is not None:
            self._feedback.load(state, self._sizes)
        else:
            drop(state, f"outer gradients of {self._algorithm.label}", "this optimizer sends them without a codec")

    @torch.no_grad()
    def all_are_alike(self) -> None:
        # After a loss this object is new, with momentum 0, because some ranks may have taken an outer step that others
        # have not.
        self._arena.adopt()
        for fragment in self._fragments:
            fragment.restart()
        self._begun = True

    @property
    def pending(self) -> bool:
        """Whether a fragment is in flight."""
        return any(fragment.mean.pending for fragment in self._fragments)

    @torch.no_grad()
    def exchange(self, round: int) -> None:
        self.apply()  # a fragment is in flight only if the loaded state was saved with a longer overlap
        self._fragments[round % len(self._fragments)].begin()
        if self._algorithm.overlap == 0:
            self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Wait for the fragment in flight, if there is one, and take its outer step.

        Raises:
            PeerLost, Timeout, TransportError: its all-reduce has failed. Nothing is changed.
        """
        for fragment in self._fragments:
            if fragment.mean.pending:
                fragment.apply()

    def flush(self) -> None:
        self.apply()

    def give_up(self) -> None:
        """Drop a fragment in flight. Not collective, once all ranks have begun it or the world has failed."""
        for fragment in self._fragments:
            fragment.mean.continue_from([])

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put the outer parameters into the model within the block, if training has begun."""
        if not self._begun:
            yield
            return
        with self._arena.restoring([run for _, run in self._arena.runs]):
            with torch.no_grad():
                for fragment in self._fragments:
                    fragment.hand_out()
            yield

    def state(self) -> dict[str, Any]:
        """Return the state. Waits for the mean of a fragment in flight, and includes it.

        With a codec it does not wait. Then the state contains what this rank has sent, and its residuals.
        """
        if not self._begun:
            return {}
        state: dict[str, Any] = {
            "parameters": list(self._arena.plain_names),
            "outer": [one for fragment in self._fragments for one in fragment.saved(fragment.outer)],
            "momentum": [one for fragment in self._fragments for one in fragment.saved(fragment.momentum)],
        }
        in_flight = [number for number, fragment in enumerate(self._fragments) if fragment.mean.pending]
        if in_flight:
            fragments = {number: self._fragments[number] for number in in_flight}
            state["pending"] = {number: one.saved(one.mean.state()) for number, one in fragments.items()}
            state["pending_averaged"] = all(one.mean.averaged for one in fragments.values())
        residuals = self._residuals()
        if residuals:
            state["residuals"] = residuals
        return state

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        outer = [one for fragment in self._fragments for one in fragment.outer]
        momentum = [one for fragment in self._fragments for one in fragment.momentum]
        # If the state is of other parameters, `begin` starts anew from the current ones.
        saved, its_momentum = state.get("outer", []), state.get("momentum", [])
        what = f"{self._algorithm.label}: outer parameters"
        self._begun = _alike(outer, saved) and is_of(state, self._arena, what)
        pending = state.get("pending", {}) if self._begun else {}
        averaged = state.get("pending_averaged", self._feedback is None)  # states of earlier versions lack it
        for number, fragment in enumerate(self._fragments):
            fragment.mean.continue_from(fragment.loaded(pending.get(number, [])), averaged)
        residuals = state.get("residuals", {})
        if not self._begun:
            drop(residuals, f"outer gradients of {self._algorithm.label}", "the outer parameters are of another model")
        self._load_residuals(residuals if self._begun else {})
        if self._begun:
            self._copy([fragment.outer for fragment in self._fragments], saved)
        if self._begun and _alike(momentum, its_momentum):
            self._copy([fragment.momentum for fragment in self._fragments], its_momentum)
        else:  # `begin` starts anew, or the momentum factor is 0 here or in the state, so one has no momentum
            for target in momentum:
                target.zero_()

    def _copy(self, targets: Sequence[Sequence[torch.Tensor]], saved: Sequence[torch.Tensor]) -> None:
        """Copy the tensors of a state to the tensors of the fragments, in order."""
        rest = list(saved)
        for fragment, own in zip(self._fragments, targets):
            values, rest = rest[: len(own)], rest[len(own) :]
            for target, value in zip(own, fragment.loaded(values)):
                target.copy_(value)


def _alike(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Return whether two lists have tensors of the same dtypes and shapes."""
    return [(one.dtype, one.shape) for one in some] == [(one.dtype, one.shape) for one in others]
