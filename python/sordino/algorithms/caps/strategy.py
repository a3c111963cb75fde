"""Strategy for parameter skipping (CaPS): steps on local gradients, then averages the parameters that have changed.

Each rank has one flag per item, which is set if it has found the item unchanged. All ranks skip the items for which the
minimum of these flags over all workers is set. So ranks always agree, also on how long each item has been skipped.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sordino._core import Request
from sordino.algorithms.caps import CaPS
from sordino.algorithms.caps.counting import Detector
from sordino.algorithms.caps.detectors import detector_of
from sordino.algorithms.caps.items import Items, Part
from sordino.algorithms.caps.parameter_server import ParameterServer
from sordino.algorithms.caps.recent import Recent
from sordino.algorithms.caps.statistics import CaPSStatistics
from sordino.algorithms.exchanging import ExchangingStrategy
from sordino.algorithms.strategy import Closure, Runtime, Strategy
from sordino.algorithms.traffic import Sent
from sordino.errors import UsageError
from sordino.runtime import opcode
from sordino.runtime.collectives.autograd import allreduce
from sordino.runtime.collectives.operation import Average, Min
from sordino.runtime.collectives.ops import grouped_allreduce_
from sordino.runtime.devices import HOST, core_device
from sordino.runtime.dtypes import DTYPES
from sordino.runtime.exchange.flat_buffer import ParameterBuffer
from sordino.runtime.exchange.helpers import helpers_of
from sordino.runtime.process_set import global_process_set
from sordino.runtime.recovery.losses import LOSSES
from sordino.runtime.tensors import describe


def _no_items() -> dict[str, Any]:
    return {"skipped": torch.zeros(0, dtype=torch.int64, device=HOST), "detector": {}}


class _Sent(NamedTuple):
    """Parts of an arena that are sent together, and views of their values."""

    parts: list[Part]
    values: list[torch.Tensor]


class CaPSStrategy(ExchangingStrategy):
    """Strategy for `CaPS`."""

    algorithm: CaPS
    _noted = 0  # points that are in the run record

    def __init__(self, runtime: Runtime, algorithm: CaPS) -> None:
        self._statistics = CaPSStatistics(algorithm.statistics_interval)
        super().__init__(runtime, algorithm)

    def prepare(self) -> None:
        self.threshold = float(self.algorithm.threshold)
        scheduler = self.algorithm.scheduler
        self._metrics: deque[float] = deque(maxlen=scheduler.history_length if scheduler else 1)
        self._epochs = 0  # metrics reported so far
        self._warned = False
        self._server: ParameterServer | None = None
        self._detector: Detector | None = None
        self._kept = False  # whether the detector has stored the parameters from before the next step
        self._late = False  # whether it stored them after forward, which may have changed buffers
        self._skipped = torch.zeros(0, dtype=torch.int64, device=HOST)  # [items]: steps in a row without each item
        self._loaded = _no_items()  # state for the items, until `attach` creates them

    def attach(self) -> None:
        workers, algorithm, context = self.settings.process_set, self.algorithm, self.context
        if algorithm.dedicated:
            helpers = helpers_of(context, algorithm)
            if workers.process_set_id != 0:
                raise UsageError("dedicated_servers=True trains on all workers, not on a process set")
            context = helpers.context  # so that parameters are in memory that servers can access
        self._arena = ParameterBuffer(context, self.exchanged_names, self.exchanged, "model")
        self._name = self.context.names.plan(f"skipping.{self._arena.layout.hash:x}", workers.process_set_id)
        block = algorithm.block_bytes if algorithm.granularity == "block" else None
        self._items = Items.of(self._arena, block)
        self._detector = detector_of(self._arena, self._items, algorithm)
        buffers = {id(buffer) for _, buffer in self.buffers}
        of_buffers = np.array([id(tensor) in buffers for tensor in self._arena.tensors], dtype=bool)
        self._of_buffers = torch.from_numpy(of_buffers[self._items.tensors])  # bool [items]
        self._skipped = torch.zeros(len(self._items), dtype=torch.int64, device=HOST)
        self._sent: Recent[_Sent] = Recent()  # the same sets of items are sent again and again
        self._mask = torch.zeros(len(self._items), dtype=torch.bool, device=HOST)
        self._statistics.describe(self._arena.names, self._items, self.steps)
        if algorithm.dedicated:
            items, arena = self._items, self._arena
            self._server = helpers.open(
                items.as_lists(arena.layout.bytes),
                lambda _: ParameterServer(context, global_process_set, algorithm, items, arena),
            )
        elif algorithm.exchange == "parameter-server":
            self._server = ParameterServer(self.context, workers, algorithm, self._items, self._arena)
        self.context.callbacks.on_shutdown.add(self._warn)
        self._restore(self._detector)

    # ---- the step ----------------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._arena.adopt()
        assert self._detector is not None
        if not self._kept:
            self._detector.begin(self.steps)
            self._kept = self._late = True

    @torch.no_grad()
    def after_step(self) -> None:
        self._arena.adopt()
        try:
            self.exchange([run for _, run in self._arena.runs], self._exchange_moved)
        except LOSSES:
            self.steps += 1  # like ranks that have completed the exchange before the loss
            raise
        self.steps += 1

    def _exchange_moved(self) -> None:
        self.settings.judge(self._arena.names, self._arena.tensors)
        detector = self._detector
        assert detector is not None
        detector.count(self.steps)
        skipped = self._agree(detector)
        detector.keep(self.steps, self._average(~skipped.numpy()))
        self._skipped = torch.where(skipped, self._skipped + 1, 0)
        self._late = False
        self._statistics.add(self.steps + 1, self.threshold, detector, skipped)

    def _agree(self, detector: Detector) -> torch.Tensor:
        """Return the items that all workers skip, bool [items]: unchanged on all, and not due for a probe."""
        still = detector.counts.double() * 100 >= self.threshold * detector.compared
        if self._late:
            still &= ~self._of_buffers
        return self._all_of(still & (self._skipped < self.algorithm.probe_interval))

    def _all_of(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the items for which `mine` is True on all workers, bool [items]. Collective."""
        self._mask.copy_(mine)
        request = Request(
            opcode.ALLREDUCE,
            f"{self._name}.skipped",
            [describe(self._mask, self._mask)],
            op=Min,
            process_set=self.settings.process_set.process_set_id or 0,
            keep=self._mask,
            device=core_device(self._mask.device, self.context),
        )
        self.context.world.run(request).wait()
        return self._mask.clone()

    def _average(self, sent: NDArray[np.bool_]) -> list[Part]:
        """Replace the items that are sent by their means over all workers. Collective.

        Returns:
            the parts of the arena that consist of these items.
        """
        parts, values = self._sent.get(sent.tobytes(), self._find_parts)
        if parts and self._server is not None:
            self._server.average(sent)
        elif parts:
            workers = self.settings.process_set
            grouped_allreduce_(values, op=Average, name=f"{self._name}.mean", process_set=workers)
        return parts

    def _find_parts(self, sent: bytes) -> _Sent:
        parts = self._items.parts(np.frombuffer(sent, dtype=bool))
        values = [
            self._arena.flat(DTYPES[part.dtype], part.offset, part.bytes // DTYPES[part.dtype].itemsize)
            for part in parts
        ]
        return _Sent(parts, values)

    def drain(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the items that the last step skipped, so that all workers have equal parameters. Collective."""
        if self._detector is None:
            return
        self._arena.adopt()
        self.settings.judge(self._arena.names, self._arena.tensors)
        with self._rollback.around([run for _, run in self._arena.runs]):
            sent = ~self._all_of(self._skipped == 0).numpy()
            parts = self._average(sent)
        self._statistics.add_flush(sent)
        if self._kept:
            self._detector.keep(self.steps - 1, parts)
        self._skipped.zero_()

    def step_begun(self, optimizer: torch.optim.Optimizer, closure: Closure, synchronize: bool) -> Any:
        """Step the optimizer, and average the items that have changed."""
        before = self.steps
        result = super().step_begun(optimizer, closure, synchronize)
        self.steps = before + 1  # also if this rank is alone, or has lost the other ranks in this step
        return result

    @property
    def sent(self) -> Sent | None:
        return (self._skipped == 0).numpy()

    @property
    def statistics(self) -> CaPSStatistics:
        return self._statistics

    # ---- the threshold -----------------------------------------------------------------------------------------

    def report_metric(self, metric: float, rate: float | None) -> None:
        """Record the metric of an epoch. Its mean over all workers determines the next threshold. Collective."""
        mean = float(metric)
        if self.active:
            mine = torch.tensor([mean], dtype=torch.float64, device=HOST)
            mean = float(allreduce(mine, op=Average, name="skipping.metric", process_set=self.settings.process_set))
        self._epochs += 1
        self._metrics.append(mean)
        self._statistics.end_epoch(self.steps, self.threshold, mean)
        if self.algorithm.scheduler is not None:
            self.threshold = self.algorithm.scheduler.threshold_after(self._epochs, self.threshold, list(self._metrics))

    def _warn(self) -> None:
        """Warn once if a scheduler needs metrics and none has been reported after the first step."""
        if self.algorithm.scheduler is not None and self._epochs == 0 and self.steps > 0 and not self._warned:
            self._warned = True
            warnings.warn(
                "CaPS(scheduler=...): optimizer.report_metric(loss) has not been called yet, so the "
                f"threshold stays at {self.threshold:g} %; call it once an epoch",
                stacklevel=2,
            )

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's own state.

        Checkpoints usually follow epochs, so a metric should have been reported by then.
        """
        self._warn()
        return super().optimizer_state(optimizer)

    def detach(self) -> None:
        super().detach()
        self.context.callbacks.on_shutdown.discard(self)

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "threshold": self.threshold,
            "metrics": list(self._metrics),
            "epochs": self._epochs,
            **(self._loaded if self._detector is None else self._items_state(self._detector)),
        }

    def _items_state(self, detector: Detector) -> dict[str, Any]:
        return {"skipped": self._skipped.clone(), "detector": detector.state()}

    def check_state(self, state: dict[str, Any]) -> None:
        super().check_state(state)
        if self._detector is not None:
            self._check_items(state, self._detector)

    def _check_items(self, state: dict[str, Any], detector: Detector) -> None:
        """Raise UsageError for a state of other items or of another detector."""
        if len(state["skipped"]) == 0:
            return
        if state["skipped"].shape != self._skipped.shape:
            raise UsageError(
                f"this state has {len(state['skipped'])} tensors or blocks, but there are {len(self._skipped)} here: "
                "load it with the same parameters, granularity and block_bytes"
            )
        detector.check_state(state["detector"])

    def noted(self) -> Mapping[str, Mapping[str, Any]]:
        points = self._statistics.points[self._noted :]
        self._noted += len(points)
        if not points:
            return {}
        skips = {
            "names": self._statistics.names,
            "bytes": self._statistics.bytes,
            "points": [asdict(point) for point in points],
        }
        return {"skips": skips}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        scheduled = self.algorithm.scheduler is not None and state["epochs"] > 0
        self.threshold = state["threshold"] if scheduled else float(self.algorithm.threshold)
        self._metrics.clear()
        self._metrics.extend(state["metrics"])
        self._epochs = state["epochs"]
        self._loaded = {"skipped": state["skipped"], "detector": state["detector"]}
        if self._detector is not None:
            self._restore(self._detector)

    def forget_loaded(self) -> None:
        self._loaded = _no_items()

    def carried_state(self) -> dict[str, Any]:
        return {**self.state_dict(), **_no_items()}  # in a new world nothing has been skipped yet

    def take_over(self, old: Strategy) -> None:
        if isinstance(old, CaPSStrategy):
            self._statistics, self._noted = old._statistics, old._noted
            if self._detector is not None:
                self._statistics.describe(self._arena.names, self._items, old.steps)
        self.load_state_dict(
            {**(old.state_dict() or {}), **_no_items()}
        )  # no item is skipped at this point, and the items may differ

    def _restore(self, detector: Detector) -> None:
        self._check_items(self._loaded, detector)
        skipped, self._loaded = self._loaded, _no_items()
        if len(skipped["skipped"]) > 0:
            self._skipped.copy_(skipped["skipped"])
            detector.load_state(skipped["detector"])
        else:  # the state comes from a single rank, or from other items
            self._skipped.zero_()
        self._kept = False
