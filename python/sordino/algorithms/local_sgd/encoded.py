"""Averaging of models by encoded changes: each rank sends the change of its model since the last averaging.

This is the outer step of DiLoCo without momentum, among peers: the ranks with the same position in their groups. The
rate is 1, or with aggregate="gradients" the number of groups. The outer parameters are the parameters after the last
averaging, in float32 for 16-bit parameters. They are equal on all peers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sordino.algorithms.diloco import DiLoCo
from sordino.algorithms.diloco.fragment import Fragment
from sordino.algorithms.local_sgd import LocalSGD
from sordino.algorithms.local_sgd.averaging import RESIDUALS_OF, Averaging, Pieces, Values
from sordino.algorithms.local_sgd.movements import fill, warn_unless, whole_parameters
from sordino.errors import UsageError
from sordino.runtime.collectives.autograd import allgather
from sordino.runtime.collectives.ops import broadcast_
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST
from sordino.runtime.exchange.residuals import Feedback, Sender
from sordino.runtime.parameter_names import finder
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import label

_BEGIN, _LOADED, _AVERAGE = range(3)
_ACTIONS = ("begins with new parameters", "begins from a checkpoint", "averages")  # for errors


class EncodedAveraging(Averaging):
    """Averages of the tensors of one rank and its peers.

    Args:
        context: the context of this rank.
        peers: the ranks with which this rank averages.
        parameters: whole parameters by their names.
        algorithm: the algorithm, with a codec.
    """

    def __init__(
        self, context: Context, peers: ProcessSet, parameters: Mapping[str, torch.Tensor], algorithm: LocalSGD
    ) -> None:
        self._context, self._peers, self._parameters = context, peers, parameters
        self._first, groups = (peers.ranks or [0])[0], len(peers.ranks or [])
        # The sum of changes is the number of groups times their mean.
        rate = float(groups) if algorithm.aggregate == "gradients" else 1.0
        self._outer_step = DiLoCo(interval=1, outer_lr=rate, outer_momentum=0.0, compression=algorithm.codec)
        self._fragments: list[Fragment] = []
        self._known = 0  # number of tensors that have outer parameters
        self._loaded: dict[str, torch.Tensor] = {}  # outer parameters of a checkpoint that are not in use yet
        assert algorithm.codec is not None
        workers = groups if algorithm.sharded else groups * algorithm.group_size
        sender = Sender.of(context, peers, algorithm.codec, algorithm.aggregate == "gradients", workers)
        self._feedback = Feedback(sender, RESIDUALS_OF)
        # Labels contain the memory order, in which residuals are: saved residuals of another order do not match.
        self._labels = {name: label(name, parameter) for name, parameter in parameters.items()}

    @property
    def begun(self) -> bool:
        return bool(self._fragments)

    @torch.no_grad()
    def note(self, values: Values, pieces: Pieces) -> None:
        """Make outer parameters for all tensors that lack them. Collective over the peers if there are such tensors.

        All peers use the first peer's values: from its checkpoint, or else its parameters. Usually values are equal on
        all peers. If not, the next averaging still gives the mean of all models, up to the encoding.
        """
        found = values()
        if self._known == len(found):
            return
        self._agree(_BEGIN)
        parts = list(pieces())
        name = f"local.outer.{len(self._fragments)}"
        fragment = Fragment(self._context, self._peers, found[self._known :], name, self._outer_step)
        find, filled = finder(self._loaded), []
        for piece in parts:
            outer = fragment.outer_of(piece.values)
            if outer is not None:
                filled.append(fill(outer, piece, self._parameters[piece.name], find))
        warn_unless(filled, self._loaded)
        for number, outer in enumerate(fragment.outer):
            broadcast_(outer, self._first, f"{name}.begin.{number}", self._peers)
        labelled = [replace(piece, name=self._labels[piece.name]) for piece in parts]
        fragment.attach(self._feedback, labelled)
        self._feedback.drop_rest({piece.name for piece in labelled}, "this rank no longer averages these elements")
        self._fragments.append(fragment)
        self._known, self._loaded = len(found), {}

    def average(self, values: Sequence[torch.Tensor], reduce: Callable[[int], None]) -> None:
        """Replace all tensors by their averages. Collective over the peers. The arguments are not used.

        Raises:
            PeerLost, Timeout, TransportError: a rank is lost. A fragment whose mean is incomplete is unchanged: its
                tensors, outer parameters and residuals.
        """
        if self._fragments:
            self._agree(_AVERAGE)
        for fragment in self._fragments:
            fragment.begin()
        for fragment in self._fragments:
            fragment.apply()

    def _agree(self, action: int) -> None:
        """Check that all peers take the same action. Collective over the peers.

        Raises:
            UsageError: only some peers have loaded a checkpoint or unfrozen parameters. Raised on all peers.
        """
        mine = _LOADED if action == _BEGIN and self._loaded else action
        actions = allgather(torch.tensor([mine], device=HOST), name="local.outer.action", process_set=self._peers)
        if len(set(actions.tolist())) == 1:
            return
        said = [f"rank {rank} {_ACTIONS[one]}" for rank, one in zip(self._peers.ranks or [], actions.tolist())]
        raise UsageError(
            "LocalSGD(compression=...): only some ranks have loaded a checkpoint or unfrozen parameters: "
            f"{'; '.join(said)}. Call load_state_dict() on all ranks, between the same steps, and unfreeze parameters "
            "on all ranks"
        )

    def state(self, values: Values, pieces: Pieces, group: ProcessSet | None) -> dict[str, Any]:
        """Return the outer parameters, as whole tensors by parameter name, and the residuals."""
        residuals = self._feedback.state()
        own = {"residuals": residuals} if residuals else {}
        if not self._fragments:
            return {"outer": self._loaded, **own} if self._loaded else own
        values()  # moves replaced parameters back into the arena
        parts = [
            (piece.name, piece.begin, piece.end, outer)
            for piece in pieces()
            for fragment in self._fragments
            if (outer := fragment.outer_of(piece.values)) is not None
        ]
        return {"outer": whole_parameters(parts, self._parameters, group), **own}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Waits for means in flight, which only a failed averaging leaves, and drops them.

        The next `note` uses the loaded outer parameters, and is collective. So all ranks must load a state, between the
        same steps.
        """
        self.restart()
        self._loaded = dict(state.get("outer", {}))
        sizes = {self._labels[name]: parameter.numel() for name, parameter in self._parameters.items()}
        self._feedback.load(state.get("residuals", {}), sizes)

    def restart(self) -> None:
        """Forget all state. The next `note` copies the parameters, which must then be equal on all peers."""
        for fragment in self._fragments:
            fragment.mean.continue_from([])
        self._fragments, self._known, self._loaded = [], 0, {}
        self._feedback.detach()
        self._feedback.load({}, {})
