"""Reducer: reduces gradients during backward, in buckets.

The plan (the gradients of each bucket, and the order of buckets) is agreed at the first synchronization, when the order
in which backward produces gradients is known. A bucket has one flag per parameter: whether this rank had a gradient for
it. A parameter that no rank used keeps `grad = None`, as it would without Sordino. A parameter that some rank used gets
the same gradient on all ranks. A cycle, from one step to the next, has these events:

| event | method | effect |
|---|---|---|
| all gradients of a bucket are complete | `completed` | the bucket's reduction starts |
| backward ends | `_backward_ended` | the other buckets start; waits for all |
| another backward adds to reduced gradients | `_begin_again` | a new cycle; they are reduced again |
| step | `step` | uses the gradients, then begins a new cycle (`reset`) |

So all gradients are reduced when backward returns, as in DDP: users clip or log the values that `step()` uses. Reducing
them again after another backward gives the right result for an average, and is refused for other reductions.

Gradients are reduced where autograd put them. Gradients that persist from step to step (`set_to_none=False`) move into
a shared arena once (places.py), where the reduction is one pass over memory.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from sordino._core import Layout, Request
from sordino.errors import NonFinite, OperationMismatch, SordinoError, StepOrderError, TransportError, UsageError
from sordino.runtime import opcode
from sordino.runtime.collectives.autograd import allgather, allreduce
from sordino.runtime.collectives.compression import Compression
from sordino.runtime.collectives.operation import Average, Sum
from sordino.runtime.collectives.sparse import no_rows, sparse_allreduce_async
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST, core_device
from sordino.runtime.gradients.bucket import Bucket, Settings, whole_layout
from sordino.runtime.gradients.hooks import GradientHooks
from sordino.runtime.gradients.own_gradients import OwnGradients
from sordino.runtime.gradients.places import Places, Unfit
from sordino.runtime.loss_state import Recoverable
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.recovery.losses import LOSSES
from sordino.runtime.tensors import Described, check, dense_strides, describe, dtype_code

_NAMED = 8  # maximum number of parameters in an error

QUIETLY = "Put all backward() but the last one before step() in optimizer.no_sync()"

_CUT_OFF = (
    "an exception ended the previous backward() while its gradients were being reduced. If all ranks raised it, call "
    "optimizer.synchronize() and then optimizer.zero_grad(), and continue with the next batch. If the other ranks have "
    "no exception, they wait for this one: call optimizer.synchronize(), and then step() in "
    "optimizer.skip_synchronize()"
)


_version_of = attrgetter("_version")


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return torch's version counters of tensors, which show changes made by Python."""
    return list(map(_version_of, tensors))


def write_flags(flags: torch.Tensor, used: Sequence[bool]) -> bool:
    """Set a bucket's flags from `used` (empty: all members have a gradient). Return whether all have one."""
    complete = all(used)
    if complete:  # does not wait for a GPU
        flags.fill_(1)
    else:
        flags.copy_(torch.tensor(used, device=HOST))
    return complete


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
        compare: whether to meet the other ranks now (collective), or at the first synchronization: a copy of an
            optimizer may exist on one rank only and never be used.
        in_step: if ranks survive losses, the ranks that take their steps together, although each group of them reduces
            its own gradients; None: the process set of `settings`.
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
        self.active = context.size > 1 and bool(settings.process_set.included())
        self._buckets: list[Bucket] | None = None
        self._sparse: dict[int, str] = {}  # parameters with sparse gradients, and the names they are reduced by
        self._unused: set[int] = set()  # parameters that no rank used in the last cycle
        self._sparse_finish: dict[int, Callable[[], torch.Tensor]] = {}
        self._looked: dict[int, Any] = {}  # evidence for sparse gradients sent last, with check_finite
        # By number of the counter's set: its bucket, or the index of a parameter with sparse gradients.
        self._watched: list[Bucket | int] = []
        self._refused: NonFinite | None = None  # to be raised by step()
        self._plan = ""  # name of the plan
        self._again = 0  # number of repeated reductions of the current step's gradients
        self._change_sent: bool | None = None  # has_changed() as sent with this cycle's buckets; None: none sent
        in_step = in_step or settings.process_set
        self._own = OwnGradients(context, in_step, self.parameters) if context.survives_losses else None
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
            raise StepOrderError(f"backward() cannot begin: {_CUT_OFF}")
        super()._begin_after_cut_off()

    def _forget_cut_off(self) -> None:
        if self.cut_off:
            for bucket in self._buckets or ():
                bucket.versions = versions_of(bucket.sent)  # a refused backward may have added to them
        super()._forget_cut_off()

    def require_whole(self, what: str) -> None:
        """Raise StepOrderError if an exception has ended a backward, so that the call `what` is not allowed."""
        if self.cut_off:
            raise StepOrderError(f"{what} is not possible yet: {_CUT_OFF}")

    def completed(self, number: int) -> None:
        of = self._watched[number]
        start: Callable[[Any], None] = self._start if isinstance(of, Bucket) else self._start_sparse
        if self._own is None:
            start(of)
        else:
            try:
                with self.context.losses.raise_on_loss():
                    start(of)
            except LOSSES:
                pass  # synchronize() starts the rest in the world of the remaining ranks
        if not self._has_end and self._has_all(but=self._unused):
            self._backward_ended()  # there will be no callback at the end

    @torch.no_grad()
    def _backward_ended(self) -> None:
        try:
            self.synchronize()
        except NonFinite as error:  # no step will be taken
            self._refused, self._counter.done = error, True

    def _begin_again(self, index: int) -> None:
        self._again += 1
        if not any(bucket.has_reduced(self.parameters) for bucket in self._buckets or ()):
            warnings.warn(
                f"the gradient of '{self.names[index]}' and others were reduced at the end of an earlier backward(), "
                "and cleared before a step() used them. Every backward() through this optimizer's parameters sends "
                "their gradients, also for the loss of another model (the generator's, through the discriminator): "
                "put that backward() in optimizer.no_sync(), or freeze the parameters for it (requires_grad_(False))",
                stacklevel=2,
            )
            return
        if self.settings.op != Average:  # a second sum would add reduced gradients of all ranks
            raise StepOrderError(
                "Gradients were computed more than backward_passes_per_step times before call to step(): all were "
                f"reduced at the end of the previous backward(), and this one adds to '{self.names[index]}'. "
                f"{QUIETLY}, or increase backward_passes_per_step"
            )
        warnings.warn(
            f"gradients are reduced in every backward() of a step: this backward() adds to '{self.names[index]}', "
            f"which was sent at the end of the previous one. {QUIETLY}, so that they are sent once",
            stacklevel=2,
        )

    def _begin_cycle(self) -> None:
        super()._begin_cycle()
        if self._change_sent:
            for bucket in self._buckets or ():
                bucket.shape_flags(len(bucket.members))
        self._refused = self._change_sent = None

    # ---- the plan ----------------------------------------------------------------------------------------------

    def _prepare_for_join(self) -> None:
        if self.active and self._buckets is None:
            self._agree(list(self._hooked))

    def prepare(self) -> None:
        """Make the plan, or add parameters that have been unfrozen to it. Collective."""
        if not self.active:
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
        self.settings.check.meet(self.context)
        wanted = set(indices)
        order = [i for i in self._counter.order if i in wanted]
        order += sorted(wanted - set(order), reverse=True)
        sparse = [
            int(grad is not None and grad.is_sparse) for grad in (self.parameters[i].grad for i in sorted(wanted))
        ]
        name = self.context.names.plan(f"gradients.{self._layout.hash:x}", process_set.process_set_id)
        self._plan = name
        mine = torch.tensor([order, sparse], device=HOST).unsqueeze(0)
        table = allgather(mine, name=f"{name}.plan", process_set=process_set)
        agreed: list[int] = table[0, 0].tolist()
        if not self.settings.sparse_as_dense:
            flagged = table[:, 1].any(dim=0).tolist()
            for i in (i for i, is_sparse in zip(sorted(wanted), flagged) if is_sparse):
                self._sparse[i] = f"{name}.{self.names[i]}"
                self._watch([i], i)
        dense = [i for i in agreed if i not in self._sparse]
        parts = [[i for i in group if i in dense] for group in self.settings.groups]
        grouped = {i for part in parts for i in part}
        for device in dict.fromkeys(parameter.device for parameter in self.parameters):
            rest = [i for i in dense if i not in grouped and self.parameters[i].device == device]
            layout = Layout([self._specify(i) for i in rest], self.settings.bucket_bytes)
            parts += [rest[run.first : run.last] for run in layout.segments]
        buckets = [self._make_bucket(f"{name}.{k}", part) for k, part in enumerate(parts) if part]
        for bucket in buckets:
            self._watch(bucket.members, bucket)
        self._buckets = (self._buckets or []) + buckets
        if self._sparse and self.instead_of_sparse is not None:
            sparse_names = ", ".join(self.names[i] for i in sorted(self._sparse))
            raise UsageError(f"sparse gradients ({sparse_names}) need sparse_as_dense=True {self.instead_of_sparse}")

    def _watch(self, members: list[int], of: Bucket | int) -> None:
        number = self._counter.watch(members)
        assert number == len(self._watched)
        self._watched.append(of)

    def _specify(self, index: int) -> tuple[str, int, tuple[int, ...]]:
        parameter = self.parameters[index]
        return (self.names[index], dtype_code(parameter), tuple(parameter.shape))

    def _make_bucket(self, name: str, members: list[int]) -> Bucket:
        packed, _ = self.settings.compression.compress(self.parameters[members[0]].new_empty(0))
        flags = packed.new_zeros(len(members))
        layouts = [(one.dtype, one.shape, tuple(dense_strides(one))) for one in (self.parameters[i] for i in members)]
        device = core_device(flags.device, self.context)
        return Bucket(name, members, flags, layouts, device)

    # ---- one bucket -------------------------------------------------------------------------------------------

    def _dense_gradient(self, index: int) -> torch.Tensor | None:
        """Return the parameter's gradient, dense and laid out like the parameter; None without a gradient."""
        parameter = self.parameters[index]
        grad = parameter.grad
        if grad is None:
            return None
        if grad.is_sparse:
            return torch.zeros_like(parameter).add_(grad)
        if grad.stride() != dense_strides(parameter) or grad.is_neg():
            grad = torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(grad)
            parameter.grad = grad
        return grad

    def _move(self, bucket: Bucket) -> list[int] | None:
        """Move the bucket's gradients to its places, which are made once the gradients persist from step to step.

        Returns:
            the members without a gradient; None if the gradients are to be reduced where they are.
        """
        if self.settings.compression is not Compression.none or bucket.private:
            return None
        try:
            if bucket.places is None:
                if not bucket.persists(self.parameters):
                    return None
                specs, flags = [self._specify(i) for i in bucket.members], bucket.flags
                bucket.places = Places(self.context, bucket.name, specs, bucket.members, self.parameters, flags)
            return bucket.places.take(lambda: not bucket.persists(self.parameters))
        except TransportError as error:
            warnings.warn(f"gradients stay in private memory, where averaging is slower: {error}", stacklevel=2)
            bucket.private = True
        except Unfit:
            bucket.places = None
        return None

    def _start(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket.

        While its gradients stay in their places, the same request is used in every step.
        """
        if self._change_sent is None:
            self._change_sent = self.has_changed is not None and self.has_changed()
        if self._change_sent:  # one more flag: the operation fails on all ranks unless all have it
            bucket.shape_flags(len(bucket.members) + 1)
        missing = None if self._change_sent else self._move(bucket)
        if self._own is not None:
            self._own.keep(bucket.members)
        name, places = self._operation_name(bucket), bucket.places
        if missing is None or places is None:
            request = self._request(name, bucket, self._describe_private(bucket))
        else:
            bucket.flags = places.flags
            used = [k not in missing for k in range(len(bucket.members))] if missing else []
            bucket.complete = write_flags(bucket.flags, used)
            bucket.sent, bucket.states = places.views, []
            if self._again:  # the name may not occur again
                request = self._request(name, bucket, places.described())
            else:
                if name not in places.requests:
                    places.requests[name] = self._request(name, bucket, places.described())
                request = places.requests[name]
        if self.settings.finite is not None:
            bucket.looked = self.settings.look(bucket.members, bucket.sent)
        bucket.versions = versions_of(bucket.sent)
        bucket.handle = self.context.world.submit(request)

    def _request(self, name: str, bucket: Bucket, described: Sequence[Described]) -> Request:
        predivide = self.settings.predivide if self.settings.op == Average else 1.0
        return Request(
            opcode.ALLREDUCE,
            name,
            described,
            self.settings.op,
            1 / predivide,
            predivide,
            process_set=self.settings.process_set.process_set_id,
            keep=(bucket.sent, bucket.flags),
            device=bucket.device,
        )

    def _describe_private(self, bucket: Bucket) -> list[Described]:
        """Describe gradients that are reduced where they are, or compressed."""
        grads = bucket.gradients(self.parameters)
        used: list[bool] = []
        if grads is None:
            grads = [self._dense_gradient(i) for i in bucket.members]
            used = [grad is not None for grad in grads]
        bucket.complete = write_flags(bucket.flags, [*used, True] if self._change_sent and used else used)
        if bucket.complete and self.settings.compression is Compression.none:
            return bucket.describe_sent(grads)  # type: ignore[arg-type]
        return self._pack(bucket, grads)

    def _pack(self, bucket: Bucket, grads: Sequence[torch.Tensor | None]) -> list[Described]:
        """Compress the gradients; zeros for a missing one."""
        packed = [
            self.settings.compression.compress(torch.zeros_like(self.parameters[i]) if grad is None else check(grad))
            for i, grad in zip(bucket.members, grads)
        ]
        bucket.sent = [tensor for tensor, _ in packed]
        bucket.states = [state for _, state in packed]
        return [describe(tensor, tensor) for tensor in (*bucket.sent, bucket.flags)]

    def _operation_name(self, bucket: Bucket) -> str:
        return self._name_now(bucket.name) if self._again else bucket.name

    def _name_now(self, name: str) -> str:
        # Ranks may reduce the gradients of one step a different number of times. Different steps must not match.
        return f"{name}.again{self._again}" if self._again else name

    def _finish(self, bucket: Bucket) -> None:
        in_place = bucket.complete and bucket.places is not None and bucket.sent is bucket.places.views
        found = self._collect(bucket)
        if in_place:
            return
        bucket.results = {}
        for i, grad in found.items():
            parameter = self.parameters[i]
            if parameter.grad is None:
                parameter.grad = grad
            elif parameter.grad.is_sparse:
                # Optimizers of sparse gradients need them sparse.
                parameter.grad = grad.to_sparse(parameter.grad.sparse_dim())
            elif parameter.grad is not grad and grad.data_ptr() != parameter.grad.data_ptr():
                parameter.grad.copy_(grad)
            bucket.results[i] = weakref.ref(parameter.grad)

    def _collect(self, bucket: Bucket) -> dict[int, torch.Tensor]:
        """Wait for a bucket. Return the reduced gradients by parameter, except of parameters that no rank used."""
        self._wait_for(bucket)
        if bucket.complete and not bucket.states:
            sent, bucket.sent = bucket.sent, []
            return dict(zip(bucket.members, sent))
        # A flag is above zero if some rank had a gradient. Reductions other than sums make flags meaningless, so every
        # parameter counts as used then. A rank that had all gradients skips the flags, as it would wait for its GPU.
        on_all_ranks = bucket.complete or self.settings.op not in (Average, Sum)
        used = [True] * len(bucket.members) if on_all_ranks else (bucket.flags > 0).tolist()
        found = {}
        states = bucket.states or [None] * len(bucket.members)
        for i, result, state, wanted in zip(bucket.members, bucket.sent, states, used):
            if wanted:
                found[i] = self.settings.compression.decompress(result, state)
            else:
                self._unused.add(i)
        bucket.sent, bucket.states = [], []
        return found

    def _wait_for(self, bucket: Bucket) -> None:
        """Wait for the reduction of a bucket. Raises StepOrderError if its gradients were changed meanwhile."""
        handle, bucket.handle = bucket.handle, None
        assert handle is not None
        try:
            handle.wait()
        except OperationMismatch as error:
            raise OperationMismatch(
                f"{error}. These are gradients: some ranks have changed the parameters of their optimizers "
                "(param_groups, a cast), and others have not. Change them on all ranks, before the same step"
            ) from error
        versions = versions_of(bucket.sent)
        if versions != bucket.versions:
            pairs = zip(bucket.members, versions, bucket.versions)
            changed = [repr(self.names[i]) for i, version, before in pairs if version != before]
            raise StepOrderError(
                f"the gradient of {', '.join(changed[:_NAMED])} was changed while it was being reduced, by a hook of a "
                "module or of another tensor, or by another thread. Change gradients in a hook of their parameter "
                "(register_hook, register_post_accumulate_grad_hook), or between backward() and step()"
            )

    # ---- sparse gradients --------------------------------------------------------------------------------------

    def _start_sparse(self, index: int) -> None:
        if self._own is not None:
            self._own.keep([index])
        parameter = self.parameters[index]
        grad = parameter.grad
        if grad is None:
            grad = no_rows(parameter)
        elif not grad.is_sparse:
            grad = grad.to_sparse(1)
        self._looked[index] = self.settings.look([index], [grad])
        op = Sum if self.settings.op != Average else Average
        self._sparse_finish[index] = sparse_allreduce_async(
            grad, self._name_now(self._sparse[index]), op, self.settings.process_set
        )

    # ---- called by the optimizer -------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether some reduction has been started and not been waited for."""
        if self._sparse_finish:
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
        """Reduce all gradients that are not reduced yet, and wait. Collective. Has no effect twice in a cycle."""
        if self._refused is not None:
            error = self._refused
            self._begin_cycle()
            raise error
        if self.backwards:
            self._forget_cut_off()
        if self._counter.done or not (self.active if self._own is None else self._own.take_part):
            return
        if self._own is None:
            self._reduce_everything()
        else:
            self._own.reduce(self._reduce_everything)
        self._counter.done = True

    def require_change_sent(self) -> None:
        """Raise StepOrderError if gradients of this cycle were sent before the optimizer's parameters changed."""
        if self._change_sent is False:
            raise StepOrderError(
                "the parameters of the wrapped optimizer were changed between backward() and step(): change them on "
                "all ranks, before backward() or after step()"
            )

    def take_as_reduced(self) -> None:
        """Treat the gradients as reduced: the step uses their current values."""
        self._counter.done = self._touched = self.active

    def _reduce_everything(self) -> None:
        """Reduce all gradients, and wait. Collective."""
        if not self.active:
            return  # this rank is the only one left, or is not in the process set
        self._start_rest()
        for index in sorted(self._sparse.keys() - self._sparse_finish.keys()):
            self._start_sparse(index)
        self._finish_all()

    def clip(self, limit: float, norm_type: float, strict: bool) -> torch.Tensor:
        """Reduce gradients, and scale them to a norm of at most `limit`. Return the norm before. Collective."""
        self.synchronize()
        return torch.nn.utils.clip_grad_norm_(self.parameters, limit, norm_type, strict)

    def regroup(self, process_set: ProcessSet) -> None:
        """Use another process set from now on."""
        self.settings = replace(self.settings, process_set=process_set)
        self.renew()

    def renew(self) -> None:
        """Continue with the remaining ranks. A new plan is made when it is needed."""
        self.active = self.context.size > 1 and bool(self.settings.process_set.included())
        self._buckets, self._watched, self._sparse, self._sparse_finish = None, [], {}, {}
        self._counter.forget()
        if self._own is not None:
            self._own.leave_world()

    def _start_rest(self) -> None:
        """Start the buckets that backward has not started. Collective."""
        self._touched = True
        if self._buckets is None or len(self._hooked) < len(self.parameters):
            self.prepare()
        for bucket in self._buckets or ():
            if bucket.handle is None:
                self._start(bucket)

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
        for index, finish in sorted(self._sparse_finish.items()):
            try:
                self.parameters[index].grad = finish()
            except SordinoError as error:
                failures.append(error)
        self._sparse_finish = {}
        if not failures and self.settings.finite is not None:
            failures = self.settings.refusals(self._buckets or (), self._looked.values())
        if failures:
            self._begin_cycle()
            raise failures[0]

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, synchronize: bool) -> Any:
        """Run the optimizer's step on reduced gradients. With a closure, they are reduced after each evaluation."""
        if closure is None:
            if synchronize and not (self._counter.done and self._refused is None):
                self.synchronize()
            if not self.active:  # checked here, because synchronize() may have lost the other ranks
                optimizer = self.settings.guarded(optimizer, self.reset)
            result = optimizer.step()
        else:
            if not self.active:
                optimizer = self.settings.guarded(optimizer, self.reset)
            result = self._step_with(optimizer, closure, synchronize)
        self.reset()
        return result

    def _step_with(self, optimizer: Any, closure: Callable[[], Any], synchronize: bool) -> Any:
        """Run a step that evaluates a closure. Gradients are reduced after each evaluation.

        An optimizer that evaluates it several times (a line search) may decide by the loss, and all ranks must make the
        same decision. So the losses are reduced, too, unless the optimizer is known to evaluate a closure once.
        """

        def evaluate() -> Any:
            if self._counter.done:
                self._begin_cycle()
            loss = closure()
            if synchronize:
                self.synchronize()
            return loss if self.settings.evaluates_once else self._loss_of_all(loss)

        return optimizer.step(evaluate)

    def _loss_of_all(self, loss: Any) -> Any:
        """Return the loss of a closure, summed or averaged over the ranks like gradients.

        A line search decides by it, and all ranks must make the same decision.
        """
        if loss is None or not self.active:
            return loss
        op = Sum if self.settings.op == Sum else Average
        mine = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64, device=HOST)
        whole = allreduce(mine, op=op, name=f"{self._plan}.loss", process_set=self.settings.process_set)
        return whole if isinstance(loss, torch.Tensor) else whole.item()

    def reset(self) -> None:
        """Begin a new cycle. The gradients of this cycle have been used or replaced."""
        if not (self._touched or self._counter.done):
            return
        if not self._counter.done and self.in_flight:
            self._finish_all()
        if self._own is not None:
            self._own.forget()
        self._again = 0
        self._begin_cycle()
