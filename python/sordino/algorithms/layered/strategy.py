"""Strategy for Layered SGD: the optimizer step is postponed until the first use of a parameter.

Backward starts the averaging of gradients (routes.py). `step()` records the step. The first use of a parameter, which
runtime/gradients/deferred_step.py intercepts, completes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sordino._core import Handle
from sordino.algorithms.exchanging import ExchangingStrategy
from sordino.algorithms.layered import Layered
from sordino.algorithms.layered.routes import BucketSpec, Route, helper_route
from sordino.algorithms.strategy import Closure
from sordino.errors import NonFinite, UsageError
from sordino.runtime.context import Context
from sordino.runtime.devices import common_device, on_stream, stream_of
from sordino.runtime.exchange.flat_buffer import FlatBuffer
from sordino.runtime.exchange.helpers import Helpers, helpers_of
from sordino.runtime.gradients.bucket import Bucket
from sordino.runtime.gradients.deferred_step import hide, storage_of, watch, watch_modules
from sordino.runtime.gradients.flat_reducer import FlatGradients, FlatReducer
from sordino.runtime.gradients.reducer import versions_of
from sordino.runtime.gradients.settings import Settings
from sordino.runtime.tensors import dtype_code

OpenRoute = Callable[[Sequence[BucketSpec], torch.device], Route]


class Travelling(FlatGradients):
    """Content of a bucket in flight: its members' gradients, a flag for each gradient that exists, and a flag "trains".

    The flag "trains" is 0 on a rank that only stands in after `join()`.
    """

    def __init__(self, values: FlatBuffer, members: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
        self._values = values
        dtype = parameters[members[0]].dtype
        views, offset = [], 0
        for i in members:
            views.append(self._values.like(parameters[i], offset * dtype.itemsize))
            offset += parameters[i].numel()
        flags = self._values.flat(dtype, offset * dtype.itemsize, len(members) + 1)
        super().__init__(views, [flags[:-1]])
        self._trains = flags[-1:]

    def say_used(self, used: Sequence[bool]) -> None:
        super().say_used(used)
        self._trains.fill_(1)

    @property
    def somebody_trains(self) -> bool:
        """Whether any rank has sent gradients, instead of standing in. Valid once averaged."""
        return bool(self._trains > 0)

    @torch.no_grad()
    def clear(self) -> None:
        """Set all gradients and flags to 0: this rank has no gradients and does not train any more."""
        self.complete = False
        for _, values in self._values.runs:
            values.zero_()


class LayeredReducer(FlatReducer):
    """Reducer that averages gradients in groups and then among communicators.

    Args:
        open_route: returns the route of some buckets; collective.
    """

    instead_of_sparse = "with Layered"
    instead_of_compression = "AllReduce"

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        settings: Settings,
        open_route: OpenRoute,
    ) -> None:
        super().__init__(context, names, parameters, settings)
        self._open_route = open_route
        self._routes: dict[str, Route] = {}
        self._travelling: dict[str, Travelling] = {}
        self.postponed: Callable[[], None] | None = None
        """Function that completes the step that uses this cycle's averages, if that step is postponed."""
        self.clears: bool | None = None
        """`set_to_none` of a zero_grad() that follows the postponed step; None: none follows."""

    def backward_adds(self, index: int) -> None:
        complete = self.postponed
        if complete is not None:  # this gradient belongs to a graph that was built before step()
            parameter = self.parameters[index]
            with torch.no_grad(), torch._C.DisableTorchFunction():
                fresh, parameter.grad = parameter.grad, None
                complete()
                parameter.grad = fresh if parameter.grad is None else parameter.grad + fresh
        super().backward_adds(index)

    def _agree(self, indices: Sequence[int]) -> None:
        super()._agree(indices)
        buckets = [bucket for bucket in self._buckets or () if bucket.name not in self._routes]
        specs = []
        for bucket in buckets:
            count = sum(self.parameters[i].numel() for i in bucket.members) + len(bucket.members) + 1
            specs.append(BucketSpec(bucket.name, dtype_code(self.parameters[bucket.members[0]]), count))
        if not specs:
            return
        device = common_device(self.parameters, "parameters that Layered trains")
        route = self._open_route(specs, device)
        for bucket in buckets:
            self._routes[bucket.name] = route
            self._travelling[bucket.name] = self._flats[bucket.name] = Travelling(
                route.flats[bucket.name], bucket.members, self.parameters
            )

    def _exchange(self, bucket: Bucket, serving: bool = False) -> Handle:
        return self._routes[bucket.name].start(bucket.name, serving)

    def views(self) -> list[torch.Tensor]:
        """Return the views of all gradients."""
        return [view for flat in self._flats.values() for view in flat.views]

    def _finish(self, bucket: Bucket) -> None:
        self._wait_for(bucket)
        flat = self._flats[bucket.name]
        for i, view, used in zip(bucket.members, flat.views, flat.used()):
            self.parameters[i].grad = view if used else None
            if not used:
                self._unused.add(i)

    def clear(self, optimizer: torch.optim.Optimizer, set_to_none: bool) -> None:
        if self.postponed is None:
            super().clear(optimizer, set_to_none)
        else:
            self.clears = set_to_none  # to be done after the postponed step

    def postpone(self, complete: Callable[[], None]) -> None:
        """Start the reductions that backward has not started, without waiting. Collective.

        `complete` must call `use`, which waits. Until then parameters have no gradients, because new gradients may be
        computed.
        """
        self._start_rest()
        for parameter in self.parameters:
            parameter.grad = None
        self.postponed, self.clears = complete, None

    def use(self) -> None:
        """Wait for the averages of a postponed step, and make them the parameters' gradients."""
        self._finish_all()
        self._counter.done = True

    def stand_in(self) -> None:
        """Take part in the steps of other ranks without gradients, as long as any rank trains."""
        trains = True
        while trains and self._buckets:
            for bucket in self._buckets:
                if bucket.handle is None:
                    self._travelling[bucket.name].clear()
                    bucket.versions = versions_of(bucket.sent)
                    bucket.handle = self._exchange(bucket, serving=True)
            self._finish_all()
            trains = self._travelling[self._buckets[-1].name].somebody_trains
            self.begin_cycle()
            for parameter in self.parameters:
                parameter.grad = None


class LayeredStrategy(ExchangingStrategy):
    """Strategy for `Layered`."""

    algorithm: Layered
    whole_models = False  # gradients are exchanged, in buckets to which unfrozen parameters are added

    def prepare(self) -> None:
        self._ids = set(map(id, self.parameters))
        self._storages: set[int] | None = None  # storages of parameters and gradients; None until `changes` needs them
        # The optimizer, and the hyper-parameters of its groups when step() was called.
        self._postponed: tuple[torch.optim.Optimizer, list[dict[str, _Setting]]] | None = None
        self._stream: torch.cuda.Stream | None = None  # the stream on which step() was called
        self._show: Callable[[], None] | None = None  # undoes the hiding of check_stale
        self._lock = threading.RLock()  # makes a thread wait while another one completes the step
        self._watch = watch()
        watch_modules()

    def attach(self) -> None:
        self._layers = LayeredReducer(self.context, self.names, self.parameters, self.settings, self._route_opener())
        self.reducer = self._layers
        self.context.callbacks.on_shutdown.add(self._before_shutdown)
        self.context.callbacks.while_joined.add(self._stand_in)

    def _route_opener(self) -> OpenRoute:
        workers, algorithm = self.settings.process_set, self.algorithm
        if algorithm.dedicated:
            helpers: Helpers = helpers_of(self.context, algorithm)
            if workers.process_set_id != 0:
                raise UsageError('Layered(communicator="rank") trains on all workers; process_set= is for "thread"')
            return lambda specs, device: helpers.open(specs, lambda agreed: helper_route(helpers, agreed, device))
        ranks, context = workers.ranks or [], self.context
        roles = algorithm.roles([context.world.nodes[rank] for rank in ranks]).of(ranks)
        return lambda specs, device: Route(context, workers, roles, specs, device)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.complete()
        self._watch.leave()

    def step_optimizer(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        if closure is not None or not synchronize or self._layers.done:
            return super().step_optimizer(optimizer, closure, synchronize)
        self._layers.postpone(self.complete)
        rates = [{key: _Setting(one) for key, one in g.items() if key != "params"} for g in optimizer.param_groups]
        self._postponed = optimizer, rates
        self._stream = stream_of(self.parameters[0].device)
        self._storages = None
        if self.algorithm.check_stale:
            self._show = hide(self.parameters)
        self._watch = watch()
        self._watch.add(self)
        return None

    def changes(self, tensor: torch.Tensor) -> bool:
        """Return whether the postponed step changes this tensor, or a tensor that shares its memory."""
        if id(tensor) in self._ids:
            return True
        if self._storages is None:  # computed late: any change of them since step() would have completed the step
            self._storages = {storage_of(one) for one in (*self.parameters, *self._layers.views())}
        storage = storage_of(tensor)
        return storage == 0 or storage in self._storages  # a tensor without memory of its own may wrap a parameter

    def complete(self) -> None:
        """Take the postponed step, if there is one.

        The step runs on the stream of the `step()` call, and without the inference, autocast and functorch modes of the
        first use.
        """
        with (
            self._lock,
            torch.inference_mode(False),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            torch._C._DisableFuncTorch(),
        ):
            if self._postponed is not None:
                optimizer, rates = self._postponed
                with on_stream(self._stream):
                    self._forget()
                    self._take(optimizer, rates)

    def _forget(self) -> None:
        self._postponed = self._layers.postponed = None
        self._watch.remove(self)
        if self._show is not None:
            self._show()
            self._show = None

    def _take(self, optimizer: torch.optim.Optimizer, rates: list[dict[str, _Setting]]) -> None:
        # Hyper-parameters set since step() are for the next step. Values that the optimizer itself changes are kept.
        later = []
        for group, then in zip(optimizer.param_groups, rates):
            later.append({key: group[key] for key, one in then.items() if one.has_changed(group[key])})
            group.update({key: then[key].then for key in later[-1]})
        try:
            self._layers.use()
            with self.stepping():
                self._layers.step(self.guarded(optimizer), None, synchronize=False)
        except NonFinite:
            self.steps -= 1  # the step was counted when it was postponed
            raise
        finally:
            for group, changed in zip(optimizer.param_groups, later):
                group.update(changed)
            if self._layers.clears is not None:
                optimizer.zero_grad(self._layers.clears)

    def _before_shutdown(self) -> None:
        if self.context.world.failed:
            self._forget()  # the averages will never arrive
        else:
            self.complete()

    def after_step(self) -> None:
        self.steps += 1

    @property
    def in_flight(self) -> bool:
        return self._postponed is None and super().in_flight

    @property
    def ready(self) -> bool:
        return self._postponed is None and super().ready

    def synchronize(self) -> None:
        with self._lock:
            if self._postponed is None:
                super().synchronize()
            self.complete()

    def drain(self, optimizer: torch.optim.Optimizer) -> None:
        self.complete()

    def state_dict(self) -> dict[str, Any]:
        self.complete()
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.complete()
        self.steps = state["steps"]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.complete()
        return super().optimizer_state(optimizer)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self.complete()
        super().load_optimizer_state(optimizer, state)

    def before_join(self) -> None:
        self.complete()

    def _stand_in(self) -> None:
        self._layers.stand_in()

    def detach(self) -> None:
        self.complete()
        self.context.callbacks.on_shutdown.discard(self)
        self.context.callbacks.while_joined.discard(self)
        super().detach()


class _Setting:
    """Hyper-parameter of a group when step() was called.

    Attributes:
        then: its value then; a copy of a tensor, because a script may change a tensor in place.
    """

    def __init__(self, value: Any) -> None:
        self._value, self._version, self.then = value, 0, value
        if isinstance(value, torch.Tensor):
            self._version, self.then = value._version, value.clone()

    def has_changed(self, now: Any) -> bool:
        """Return whether `now` is another object, or the same tensor but changed in place."""
        if now is not self._value:
            return True
        return isinstance(now, torch.Tensor) and now._version != self._version
