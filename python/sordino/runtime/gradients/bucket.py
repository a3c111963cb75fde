"""Buckets: gradients that are reduced as one operation.

A bucket has one flag per member: whether this rank had a gradient for it. The flags are reduced with the gradients. A
bucket passes these steps in each cycle; the reducer submits the request and waits:

| method | effect |
|---|---|
| `request` | describes the gradients and flags to the core, in their places or where autograd put them |
| `collect` | returns the reduced gradients |
| `hand_out` | makes them the gradients of the members |
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sordino._core import Device, Handle, Request
from sordino.errors import TransportError, UsageError
from sordino.runtime import opcode
from sordino.runtime.collectives.compression import Compression
from sordino.runtime.collectives.operation import Average, Sum
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST, core_device
from sordino.runtime.gradients.nonfinite import Evidence
from sordino.runtime.gradients.places import Places, Unfit, is_shared, spec_of
from sordino.runtime.gradients.settings import Settings
from sordino.runtime.local_shards import LocalShard
from sordino.runtime.tensors import Described, check, dense_strides, describe


class WhenWaited:
    """Handle of a reduction that runs when `wait()` is called."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.wait = run


@dataclass
class Bucket:
    """Parameters whose gradients are reduced as one operation."""

    name: str
    members: list[int]  # indices of its parameters
    names: Sequence[str]  # names of all parameters
    parameters: Sequence[torch.Tensor]  # all parameters
    settings: Settings
    flags: torch.Tensor
    layouts: list[tuple[torch.dtype, torch.Size, tuple[int, ...]]]  # dtype, shape and strides of each member
    ordinal: int  # torch's number of their GPU; -1: they are on the host
    device: Device | None = None  # of the core; None: the host
    private: bool = False  # the gradients never move to places
    places: Places | None = None  # shared memory of the gradients, once they persist
    changed: bool = False  # one more flag is sent; see `send_change`
    templates: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # dtype and shape of `sent` and flags
    missing: list[int] = field(default_factory=list)  # positions of members that had no gradient on this rank
    sent: list[torch.Tensor] = field(default_factory=list)  # tensors being reduced, by member
    states: list[Any] = field(default_factory=list)  # state for decompression
    versions: list[int] = field(default_factory=list)  # torch's version counters of `sent` at the start
    looked: Evidence | None = None  # about the gradients sent last, with check_finite
    handle: Handle | WhenWaited | None = None
    results: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)  # reduced outside of `places`

    @classmethod
    def of(
        cls,
        context: Context,
        name: str,
        members: list[int],
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        settings: Settings,
    ) -> Bucket:
        """Return a new bucket.

        Args:
            context: the context of this rank.
            name: name of the bucket.
            members: indices of its parameters, which have the same dtype and device.
            names: names of all parameters.
            parameters: all parameters.
            settings: settings of the reduction.
        """
        own = [parameters[i] for i in members]
        packed, _ = settings.compression.compress(own[0].new_empty(0))
        flags = packed.new_zeros(len(members))
        layouts = [(one.dtype, one.shape, tuple(dense_strides(one))) for one in own]
        shards = any(isinstance(one, LocalShard) for one in own)
        private = shards or settings.codec is not None or settings.compression is not Compression.none
        device = core_device(flags.device, context)
        ordinal = flags.get_device()
        return cls(name, members, names, parameters, settings, flags, layouts, ordinal, device, private)

    # ---- the start ---------------------------------------------------------------------------------------------

    def request(self, context: Context, name: str, repeated: bool, stays: bool = False) -> Request:
        """Return the request that reduces the gradients.

        While the gradients stay in their places, every step uses the same request.

        Args:
            context: the context of this rank.
            name: name of the operation.
            repeated: whether the gradients of this step have been reduced before, under another name.
            stays: whether the gradients must stay where they are.
        """
        places = None if stays else self._move(context)
        described = self._describe() if places is None else places.described
        if self.missing:
            self.flags.copy_(torch.tensor([k not in self.missing for k in range(len(self.flags))], device=HOST))
        else:
            self.flags.fill_(1)  # does not wait for a GPU
        requests = {} if places is None or repeated else places.requests  # a repetition's name may not occur again
        if name not in requests:
            op = self.settings.op
            predivide = self.settings.predivide if op == Average else 1.0
            requests[name] = Request(
                opcode.ALLREDUCE,
                name,
                described,
                op,
                1 / predivide,
                predivide,
                process_set=self.settings.process_set.process_set_id,
                keep=(self.sent, self.flags),
                device=self.device,
            )
        return requests[name]

    def gather(self) -> list[torch.Tensor]:
        """Set the flags, and return the members' gradients (not copies), with zeros for missing ones."""
        self._describe()
        self.flags.fill_(1)
        self.flags[self.missing] = 0
        return self.sent

    def _moved_away(self, index: int) -> UsageError:
        """Return the error for a parameter that has moved to another device."""
        return UsageError(
            f"'{self.names[index]}' has moved from {self.flags.device} to {self.parameters[index].device} since its "
            "gradient was first reduced: move the model before its first step, or wrap the optimizer again"
        )

    def sends_as_produced(self) -> bool:
        """Return whether `request` will use the gradients where autograd has put them, without computing on them."""
        moves = self.places is not None or (not (self.private or self.changed) and self._persists())
        return not moves and self.settings.compression is Compression.none and self._gradients() is not None

    def send_change(self, changed: bool) -> None:
        """From now on, send one more flag if `changed`. If only some ranks do, the operation fails on all ranks."""
        self.changed = changed
        self.flags, self.templates = self.flags.new_zeros(len(self.members) + changed), []

    def _move(self, context: Context) -> Places | None:
        """Move the gradients to their places, which are made once the gradients persist from step to step.

        Returns:
            the places; None if the gradients are to be reduced where they are.
        """
        if self.private or self.changed:
            return None
        try:
            if self.places is None:
                if not self._persists():
                    return None
                specs = [spec_of(self.names[i], self.parameters[i]) for i in self.members]
                self.places = Places(context, self.name, specs, self.members, self.parameters, self.flags)
            missing = self.places.take(self._persists)
        except TransportError as error:
            warnings.warn(f"gradients stay in private memory, where averaging is slower: {error}", stacklevel=2)
            self.private = True
            return None
        except Unfit:
            self.places = None
            return None
        if missing is None:
            return None
        self.missing, self.flags = missing, self.places.flags
        self.sent, self.states = self.places.views, []
        return self.places

    def _persists(self) -> bool:
        """Return whether all members still have the gradients of the last reduction, and no other object has them."""
        for i, kept in self.results.items():
            gradient = self.parameters[i].grad
            if gradient is None or gradient is not kept():
                return False
            del gradient
            if is_shared(self.parameters[i]):
                return False
        return len(self.results) == len(self.members)

    def _describe(self) -> list[Described]:
        """Describe the gradients where they are, or compressed copies of them, and the flags."""
        grads: Sequence[torch.Tensor | None] | None = self._gradients()
        self.missing = []
        if grads is None:
            grads = [self._dense_gradient(i) for i in self.members]
            self.missing = [k for k, grad in enumerate(grads) if grad is None]
        if self.missing or self.settings.compression is not Compression.none:
            return self._pack(grads)
        self.sent, self.states, described = grads, [], []  # type: ignore[assignment]
        if not self.templates:
            self.templates = [(code, shape) for _, _, code, shape in map(describe, [*self.sent, self.flags])]
        for tensor, (code, shape) in zip((*self.sent, self.flags), self.templates):
            address = tensor.data_ptr()
            described.append((address, address, code, shape))
        return described

    def _gradients(self) -> list[torch.Tensor] | None:
        """Return the gradients of the members; None if one is missing, or differs in dtype, shape or strides."""
        parameters = self.parameters
        found: list[torch.Tensor] = []
        for i, (dtype, shape, strides) in zip(self.members, self.layouts):
            grad = parameters[i].grad
            if (
                grad is None
                or grad.is_sparse
                or grad.dtype != dtype
                or grad.shape != shape
                or grad.stride() != strides
                or grad.is_neg()
            ):
                self.templates = []
                return None
            if grad.get_device() != self.ordinal:
                raise self._moved_away(i)
            found.append(grad)
        return found

    def _dense_gradient(self, index: int) -> torch.Tensor | None:
        """Return the parameter's gradient, dense and laid out like the parameter; None without a gradient.

        Raises:
            UsageError: the parameter has moved to another device.
        """
        parameter = self.parameters[index]
        if parameter.get_device() != self.ordinal:
            raise self._moved_away(index)
        grad = parameter.grad
        if grad is None:
            return None
        if grad.is_sparse:
            return torch.zeros_like(parameter).add_(grad)
        if grad.stride() != dense_strides(parameter) or grad.is_neg():
            grad = torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(grad)
            parameter.grad = grad
        return grad

    def _pack(self, grads: Sequence[torch.Tensor | None]) -> list[Described]:
        """Compress the gradients, with zeros for missing ones."""
        packed = [
            self.settings.compression.compress(torch.zeros_like(self.parameters[i]) if grad is None else check(grad))
            for i, grad in zip(self.members, grads)
        ]
        self.sent = [tensor for tensor, _ in packed]
        self.states = [state for _, state in packed]
        return [describe(tensor, tensor) for tensor in (*self.sent, self.flags)]

    # ---- the end -----------------------------------------------------------------------------------------------

    def collect(self) -> dict[int, torch.Tensor]:
        """Return the reduced gradients by parameter, except of parameters that no rank used."""
        sent, states, self.sent, self.states = self.sent, self.states, [], []
        if not self.missing and not states:
            return dict(zip(self.members, sent))
        # A flag is above zero if some rank had a gradient. Reductions other than sums make flags meaningless, so every
        # parameter counts as used then. A rank that had all gradients does not read the flags: that waits for a GPU.
        all_used = not self.missing or self.settings.op not in (Average, Sum)
        used = [True] * len(self.members) if all_used else (self.flags > 0).tolist()
        return {
            i: self.settings.compression.decompress(result, state)
            for i, result, state, wanted in zip(self.members, sent, states or [None] * len(sent), used)
            if wanted
        }

    def hand_out(self) -> list[int]:
        """Give the members their reduced gradients. Return the members that no rank used."""
        in_places = not self.missing and self.places is not None and self.sent is self.places.views
        found = self.collect()
        if in_places:
            return []
        results = self.results = {}
        parameters = self.parameters
        for i, grad in found.items():
            parameter = parameters[i]
            if parameter.grad is None:
                parameter.grad = grad
            elif parameter.grad.is_sparse:
                # Optimizers for sparse gradients need a sparse result.
                parameter.grad = grad.to_sparse(parameter.grad.sparse_dim())
            elif parameter.grad is not grad and grad.data_ptr() != parameter.grad.data_ptr():
                parameter.grad.copy_(grad)
            results[i] = weakref.ref(parameter.grad)
        return [] if len(found) == len(self.members) else [i for i in self.members if i not in found]

    def has_reduced(self) -> bool:
        """Return whether some member still has the gradient from the last reduction."""
        if self.places is not None and self.places.has_some():
            return True
        gradients = ((self.parameters[i].grad, kept()) for i, kept in self.results.items())
        return any(now is not None and now is reduced for now, reduced in gradients)
