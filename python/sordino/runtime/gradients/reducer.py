"""Reducer: reduces gradients during backward, in buckets.

The ranks agree on the plan (the gradients of each bucket, and the order of buckets; plan.py) when they synchronize
first, because the order in which backward produces gradients is known then. A bucket (bucket.py) has one flag per
parameter: whether this rank had a gradient for it. A parameter that no rank used keeps `grad = None`, as it would
without Sordino. A parameter that some rank used gets the same gradient on all ranks. A cycle, from one step to the
next, has these events:

| event | method | effect |
|---|---|---|
| all gradients of a bucket are complete | `completed` | the bucket's reduction starts |
| backward ends | `_backward_ended` | the other buckets start; waits for all |
| another backward adds to reduced gradients | `_begin_again` | a new cycle; they are reduced again |
| step | `step` | uses the gradients, then begins a new cycle (`reset`) |

So all gradients are reduced when backward returns, as in DDP: users clip or log the values that `step()` uses. Reducing
them again after another backward gives the right result for an average, and is refused for other reductions.

Autograd may have produced the gradients of a bucket on several streams of a GPU. The reduction waits for all of them.

Gradients are reduced where autograd put them. Gradients that persist from step to step (`set_to_none=False`) move into
a shared arena once (places.py), where the reduction is one pass over memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from sordino.errors import NonFinite, OperationMismatch, SordinoError, UsageError
from sordino.runtime.collectives.operation import Average, Sum, name_of_op
from sordino.runtime.context import Context
from sordino.runtime.gradients import misuse
from sordino.runtime.gradients.bucket import Bucket, WhenWaited
from sordino.runtime.gradients.closures import reducing
from sordino.runtime.gradients.encoded_buckets import EncodedBuckets
from sordino.runtime.gradients.hooks import GradientHooks
from sordino.runtime.gradients.own_gradients import OwnGradients
from sordino.runtime.gradients.plan import agree_on_order, divide, whole_layout
from sordino.runtime.gradients.settings import Settings
from sordino.runtime.gradients.sparse_gradients import SparseGradients
from sordino.runtime.local_shards import clip_grad_norm
from sordino.runtime.loss_state import Recoverable
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.recovery.losses import LOSSES

_version_of = attrgetter("_version")


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return torch's version counters of tensors, which show changes made by Python."""
    return list(map(_version_of, tensors))


class GradientReducer(GradientHooks):
    """Reduces the gradients of `parameters` over a process set.

    Attributes:
        instead_of_sparse: alternative for users of sparse gradients, for an error message; None if sparse gradients
            are supported.
        has_changed: returns whether the optimizer's parameters differ from this reducer's; None: not compared.

    Args:
        context: the context of this rank.
        names: names of the parameters, the same on all ranks.
        parameters: the parameters.
        settings: settings of the reduction.
        compare: whether to meet the other ranks now (collective); False: at the first synchronization. A copy of an
            optimizer needs False, because it may exist on one rank only and never be used.
        in_step: the ranks that take their steps together, although each group of them reduces its own gradients; None:
            the process set of `settings`.
    """

    instead_of_sparse: str | None = None
    has_changed: Callable[[], bool] | None = None

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        settings: Settings,
        compare: bool,
        in_step: ProcessSet | None = None,
    ) -> None:
        super().__init__(names, parameters, settings.passes)
        self.context = context
        self.settings = settings
        self.number = context.rank  # rank in this world, the key of its residuals
        self.active = context.size > 1 and bool(settings.process_set.included())
        self._buckets: list[Bucket] | None = None
        self._sparse = SparseGradients(self.parameters, settings)
        self._in_step = in_step or settings.process_set
        self._encoded = self._encoder()
        self._unused: set[int] = set()  # parameters that no rank used in the last cycle
        # For each set of the counter, by its number: the bucket, or the index of a parameter with sparse gradients.
        self._watched: list[Bucket | int] = []
        self._refused: NonFinite | None = None  # to be raised by step()
        self.plan = ""  # name of the plan
        self._again = 0  # number of repeated reductions of the current step's gradients
        self._suffix = ""  # added to the names of operations in this cycle
        self._change_sent: bool | None = None  # has_changed() as sent with this cycle's buckets; None: none sent
        self._own = OwnGradients(context, self._in_step, self.parameters) if context.survives_losses else None
        if not self.active:
            return
        if compare:
            settings.check.meet(context)
            context.callbacks.on_join.add(self._prepare_for_join)
        self._layout = whole_layout(self.names, self.parameters)
        if self._own is not None:
            method = weakref.WeakMethod(self.renew)
            context.losses.recoverables[id(self)] = Recoverable(method, method)
        self._watch_new()

    def _encoder(self) -> EncodedBuckets | None:
        codec = self.settings.codec
        return None if codec is None else EncodedBuckets(self.context, codec, self.settings, self._in_step)

    def residuals(self) -> dict[str, Any]:
        """Return this rank's residuals of error feedback, for checkpoints; {} without residuals."""
        return {} if self._encoded is None else self._encoded.feedback.state()

    def load_residuals(self, state: dict[str, Any]) -> None:
        """Load what `residuals()` returned. All residuals become 0 if `state` is empty. Not collective."""
        if self._encoded is not None:
            sizes = {name: parameter.numel() for name, parameter in zip(self.names, self.parameters)}
            self._encoded.feedback.load(state, sizes)

    def release(self) -> None:
        """Release the parameters, so that another reducer can use them."""
        super().release()
        self.context.callbacks.on_join.discard(self)
        self.context.losses.recoverables.pop(id(self), None)
        if self._own is not None:
            self._own.release()

    # ---- events of backward ------------------------------------------------------------------------------------

    def _begin_after_cut_off(self) -> None:
        if self.in_flight:
            raise misuse.after_cut_off("backward() cannot begin")
        super()._begin_after_cut_off()

    def _forget_cut_off(self) -> None:
        if self.cut_off:
            for bucket in self._buckets or ():
                bucket.versions = versions_of(bucket.sent)  # a refused backward may have added to them
        super()._forget_cut_off()

    def require_whole(self, what: str) -> None:
        """Raise StepOrderError, for the call `what`, if an exception has ended a backward of this cycle."""
        if self.cut_off:
            raise misuse.after_cut_off(f"{what} is not possible yet")

    def completed(self, number: int) -> None:
        of = self._watched[number]
        start: Callable[[Any], None] = self._start if isinstance(of, Bucket) else self._start_sparse
        if self._own is None:
            start(of)
        else:
            try:
                with self.context.losses.raising_on_loss():
                    start(of)
            except LOSSES:
                pass  # synchronize() starts the rest in the world of the remaining ranks
        if not self._has_end and self._has_all(but=self._unused):
            self._backward_ended()  # compiled autograd calls no callback at the end

    @torch.no_grad()
    def _backward_ended(self) -> None:
        try:
            self.synchronize()
        except NonFinite as error:  # no step will be taken
            self._refused, self._counter.done = error, True

    def _begin_again(self, index: int) -> None:
        self._again += 1
        # Ranks may reduce the gradients of a step different numbers of times. Operations of two steps must not match.
        self._suffix = f".again{self._again}"
        if not (self._sparse.has_reduced() or any(bucket.has_reduced() for bucket in self._buckets or ())):
            misuse.warn_of_unused(self.names[index])
        elif self.settings.op == Average:
            misuse.warn_of_repetition(self.names[index])
        else:  # a second sum would add reduced gradients of all ranks
            raise misuse.added_to_reduced(self.names[index])

    def begin_cycle(self) -> None:
        super().begin_cycle()
        if self._change_sent:
            for bucket in self._buckets or ():
                bucket.send_change(False)
        self._refused = self._change_sent = None

    # ---- the plan ----------------------------------------------------------------------------------------------

    def _prepare_for_join(self) -> None:
        if self.active and self._buckets is None:
            self._agree(list(self._hooked))

    def prepare(self) -> None:
        """Make the plan, or add newly unfrozen parameters to it. Collective."""
        if not self.active or (self._buckets is not None and len(self._hooked) == len(self.parameters)):
            return
        found = self._watch_new()
        if self._buckets is None:
            self._agree(list(self._hooked))
        elif found:
            self._agree(found)

    def _agree(self, indices: Sequence[int]) -> None:
        """Agree with all ranks on the order of these gradients and on which are sparse. Collective.

        Adds their buckets to the plan.
        """
        process_set = self.settings.process_set
        name = self.context.names.plan(f"gradients.{self._layout.hash:x}", process_set.process_set_id)
        self.plan = name
        order, sparse = agree_on_order(name, indices, self._counter.order, self.parameters, process_set)
        if not self.settings.sparse_as_dense:
            for i in sparse:
                self._sparse.names[i] = f"{name}.{self.names[i]}"
                self._watch([i], i)
        dense = [i for i in order if i not in self._sparse.names]
        parts = divide(dense, self.names, self.parameters, self.settings)
        buckets = [self._make_bucket(f"{name}.{k}", part) for k, part in enumerate(parts) if part]
        for bucket in buckets:
            self._watch(bucket.members, bucket)
        self._buckets = (self._buckets or []) + buckets
        self._check_sparse()

    def _check_sparse(self) -> None:
        """Raise UsageError if there are sparse gradients that cannot be reduced as such; the same on all ranks."""
        instead, op = self.instead_of_sparse, self.settings.op
        if instead is None and op not in (Average, Sum):
            instead = f"with op={name_of_op(op)}, which needs the zeros as well"
        if self._sparse.names and instead is not None:
            sparse_names = ", ".join(self.names[i] for i in sorted(self._sparse.names))
            raise UsageError(f"sparse gradients ({sparse_names}) need sparse_as_dense=True {instead}")

    def _watch(self, members: list[int], of: Bucket | int) -> None:
        number = self._counter.watch(members, of.device if isinstance(of, Bucket) else None)
        assert number == len(self._watched)
        self._watched.append(of)

    def _make_bucket(self, name: str, members: list[int]) -> Bucket:
        return Bucket.of(self.context, name, members, self.names, self.parameters, self.settings)

    # ---- reductions --------------------------------------------------------------------------------------------

    def _start(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket."""
        if self._change_sent is None:
            self._change_sent = self.has_changed is not None and self.has_changed()
        if self._change_sent:
            bucket.send_change(True)
        streams = self._counter.streams(bucket.members[0])
        computes = not (self._own is None and self._encoded is None and self.settings.finite is None)
        if len(streams) > 1 and bucket.device is not None and (computes or not bucket.sends_as_produced()):
            bucket.device.wait_for(streams)  # torch computes on these gradients, on the current stream
        if self._own is not None:
            self._own.keep(bucket.members)
        name = bucket.name + self._suffix
        if self._encoded is not None:
            bucket.handle = WhenWaited(partial(self._encoded.average, bucket, name))
            return
        # A captured CUDA graph writes gradients without calling hooks, and always to the same memory.
        stays = bucket.device is not None and not self._counter.has_all(bucket.members[:1])
        request = bucket.request(self.context, name, repeated=self._again > 0, stays=stays)
        if self.settings.finite is not None:
            bucket.looked = self.settings.look(bucket.members, bucket.sent)
        bucket.versions = versions_of(bucket.sent)
        bucket.handle = self.context.world.submit(request, streams)

    def _start_sparse(self, index: int) -> None:
        if self._own is not None:
            self._own.keep([index])
        self._sparse.start(index, self._suffix)

    def _start_rest(self) -> None:
        """Start the reductions that backward has not started. Collective."""
        self.touched = True
        if self._buckets is None or len(self._hooked) < len(self.parameters):
            self.prepare()
        for bucket in self._buckets or ():
            if bucket.handle is None:
                self._start(bucket)
        for index in sorted(self._sparse.names.keys() - self._sparse.in_flight.keys()):
            self._start_sparse(index)

    def _finish_all(self) -> None:
        """Wait for all reductions in flight, then raise the first error, if any."""
        failures: list[Exception] = []
        self._unused = set()
        for bucket in self._buckets or ():
            if bucket.handle is not None:
                try:
                    self._finish(bucket)
                except SordinoError as error:
                    failures.append(error)
        if self._sparse.in_flight:
            failures += self._sparse.finish()
            self._unused |= self._sparse.unused
        if not failures and self._encoded is not None:
            self._encoded.report()
        if not failures and self.settings.finite is not None:
            evidence = [bucket.looked for bucket in self._buckets or ()]
            failures = self.settings.refusals([*evidence, *self._sparse.looked.values()])
        if failures:
            self.begin_cycle()
            raise failures[0]

    def _finish(self, bucket: Bucket) -> None:
        """Wait for the reduction of a bucket, and make the results the gradients."""
        self._wait_for(bucket)
        self._unused.update(bucket.hand_out())

    def _wait_for(self, bucket: Bucket) -> None:
        """Wait for the reduction of a bucket. Raises StepOrderError if its gradients were changed meanwhile."""
        handle, bucket.handle = bucket.handle, None
        assert handle is not None
        try:
            handle.wait()
        except OperationMismatch as error:
            raise misuse.changed_on_some_ranks(error) from error
        versions = versions_of(bucket.sent)
        if versions != bucket.versions:
            pairs = zip(bucket.members, versions, bucket.versions)
            raise misuse.changed_in_flight([self.names[i] for i, version, before in pairs if version != before])

    def _reduce_if_active(self) -> None:
        """Reduce all gradients, and wait, unless this rank is the only one left or not in the process set."""
        if self.active:
            self._start_rest()
            self._finish_all()

    # ---- called by the optimizer -------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether some reduction has been started and not been waited for."""
        if self._sparse.in_flight:
            return True
        for bucket in self._buckets or ():  # noqa: SIM110
            if bucket.handle is not None:
                return True
        return False

    @property
    def final(self) -> bool:
        """Whether the gradients have the values that `step()` will use."""
        return not self.active or self._counter.done

    @property
    def ready(self) -> bool:
        """Whether backward has produced all gradients that are expected, and they are not reduced yet."""
        return self.active and not self._counter.done and self._has_all(but=self._unused)

    def synchronize(self) -> None:
        """Reduce all gradients that are not reduced yet, and wait. Collective. Idempotent within a cycle."""
        if self._refused is not None:
            error = self._refused
            self.begin_cycle()
            raise error
        if self.backwards:
            self._forget_cut_off()
        if self._counter.done or not (self.active if self._own is None else self._own.take_part):
            return
        if self._buckets is None:
            self.settings.check.meet(self.context)  # before the reduction, which is repeated as a whole after a loss
        if self._own is None:
            self._start_rest()
            self._finish_all()
        else:
            self._own.reduce(self._reduce_if_active)
        self._counter.done = True

    def require_change_sent(self) -> None:
        """Raise StepOrderError if gradients of this cycle were sent before the optimizer's parameters changed."""
        if self._change_sent is False:
            raise misuse.changed_since_backward()

    def take_as_reduced(self) -> None:
        """Treat the gradients as reduced: the step uses their current values."""
        self._counter.done = self.touched = self.active

    def clear(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        """Clear the gradients, as `zero_grad()`, after backward or a reduction has begun in this cycle (`touched`).

        Raises:
            StepOrderError: gradients are being reduced.
        """
        if self.in_flight:
            self.require_whole("zero_grad()")
            raise misuse.cleared_in_flight()
        self.reset()  # no step will use these gradients
        optimizer.zero_grad(set_to_none=set_to_none)

    def clip(self, limit: float, norm_type: float, strict: bool) -> torch.Tensor:
        """Reduce gradients, and scale them to a norm of at most `limit`. Return the norm before. Collective."""
        self.synchronize()
        return clip_grad_norm(self.parameters, limit, norm_type, strict)

    def regroup(self, process_set: ProcessSet) -> None:
        """Use another process set from now on. Residuals are kept, and sent to it."""
        residuals = self.residuals()
        self.settings = replace(self.settings, process_set=process_set)
        self.renew()
        self.load_residuals(residuals)

    def renew(self) -> None:
        """Continue with the remaining ranks. A new plan is made when it is needed."""
        self.number = self.context.rank
        self.active = self.context.size > 1 and bool(self.settings.process_set.included())
        self._buckets, self._watched = None, []
        self._sparse, self._encoded = SparseGradients(self.parameters, self.settings), self._encoder()
        self._counter.forget()
        if self._own is not None:
            self._own.leave_world()

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, synchronize: bool) -> Any:
        """Run the optimizer's step on reduced gradients. With a closure, they are reduced after each evaluation."""
        if closure is None and synchronize and not (self._counter.done and self._refused is None):
            self.synchronize()
        if not self.active:  # checked here, because synchronize() may have lost the other ranks
            optimizer = self.settings.guarded(optimizer, self.reset)
        result = optimizer.step() if closure is None else optimizer.step(reducing(self, closure, synchronize))
        self.reset()
        return result

    def reset(self) -> None:
        """Begin a new cycle. The gradients of this cycle have been used or replaced."""
        if not (self.touched or self._counter.done):
            return
        if not self._counter.done and self.in_flight:
            self._finish_all()
        if self._own is not None:
            self._own.forget()
        if self._again:
            self._again, self._suffix = 0, ""
        self.begin_cycle()
