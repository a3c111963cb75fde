"""Strategy for local SGD: groups step on their own gradients, and every `interval` steps their models are averaged.

The averaging is an all-reduce of flat tensors among *peers*: the ranks with the same position in their groups. The
tensors hold the whole model with exchange="allreduce", or the part that a rank owns with exchange="sharded".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sordino.algorithms.diloco.fragment import Elements
from sordino.algorithms.exchanging import ExchangingStrategy
from sordino.algorithms.local_sgd import LocalSGD
from sordino.algorithms.local_sgd.averaging import Averaging, drop_residuals
from sordino.algorithms.local_sgd.elementwise import Trial, require_elementwise
from sordino.algorithms.local_sgd.encoded import EncodedAveraging
from sordino.algorithms.local_sgd.gathering import Gathering
from sordino.algorithms.local_sgd.movements import Movements
from sordino.algorithms.local_sgd.sharded_state import gather_state, in_memory_order, scatter_state, take_over_state
from sordino.algorithms.local_sgd.sharding import ShardedReducer
from sordino.algorithms.strategy import Runtime, Strategy, only_a_part
from sordino.errors import UsageError
from sordino.runtime.collectives.autograd import allreduce
from sordino.runtime.collectives.operation import Average, Max, Sum
from sordino.runtime.collectives.ops import grouped_allreduce_
from sordino.runtime.devices import HOST
from sordino.runtime.exchange.channel import PreparedReduction
from sordino.runtime.exchange.flat_buffer import ParameterBuffer
from sordino.runtime.exchange.groups import group_of, new_channel, peers_of
from sordino.runtime.exchange.rollback import take_mean
from sordino.runtime.tensors import squared_distance


class MeanOfModels(Averaging):
    """Means of whole models."""

    counts_changes = False

    def average(self, values: Sequence[torch.Tensor], reduce: Callable[[int], None]) -> None:
        reduce(Average)

    def load_state(self, state: Mapping[str, Any]) -> None:
        drop_residuals(state)


class LocalSGDStrategy(ExchangingStrategy):
    """Strategy for `LocalSGD`."""

    algorithm: LocalSGD
    asked: LocalSGD
    _rate = 0.0  # learning rate of the first parameter group in the last step; kept when ranks meet again

    def __init__(self, runtime: Runtime, algorithm: LocalSGD) -> None:
        if algorithm.sharded:
            require_elementwise(runtime.optimizer, algorithm)
        super().__init__(runtime, algorithm)

    def prepare(self) -> None:
        self.interval = self.algorithm.interval
        self._alone = self.algorithm.start in ("immediate", 0)  # whether groups train separately
        self._averaged = 0  # the step after which models were averaged last, or groups began to train separately
        self._highest_rate = -math.inf
        self._first_metric: tuple[float, float] | None = None  # rate and loss
        self._block_ends = 0
        self._shards: ShardedReducer | None = None  # the reducer, with exchange="sharded"
        self._gathering: Gathering | None = None  # the gather that step() does not wait for, with overlap=True
        self._arena: ParameterBuffer | None = None
        self._tried = not self.algorithm.elementwise  # whether elementwise=True was not given, or has been checked
        self._averaging: Averaging = MeanOfModels()
        self._loaded: dict[str, Any] = {}  # state of the averaging, until `attach` creates it
        self._prepared: tuple[int, PreparedReduction] | None = None  # number of tensors, and their reduction

    @property
    def mean_after_loss(self) -> bool:  # type: ignore[override]
        return self._alone  # before groups train separately, all ranks share one model and step together

    @property
    def partial_state(self) -> bool:  # type: ignore[override]
        return self.active and self.algorithm.sharded

    @property
    def whole_models(self) -> bool:  # type: ignore[override]
        return not self.algorithm.sharded  # shards of unfrozen parameters are made in their first step, without meeting

    # ---- meeting -----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        context, algorithm, workers = self.context, self.algorithm, self.settings.process_set
        self._models = algorithm.groups_of(len(workers.ranks or []))
        self._group = group_of(context, workers, algorithm.group_size)
        self._peers = peers_of(context, workers, algorithm.group_size)
        if algorithm.sharded:
            channel = new_channel(context, self._group)
            within = replace(self.settings, process_set=self._group)
            self.reducer = self._shards = ShardedReducer(context, self.names, self.parameters, within, channel)
            self._gathering = Gathering(self._shards) if algorithm.overlap else None
        elif self._models > 1:
            names = self.exchanged_names[: len(self.trained)]
            self._arena = ParameterBuffer(context, names, self.trained, "model")
        self._averaging, loaded, self._loaded = self._make_averaging(), self._loaded, {}
        self._averaging.load_state(loaded)
        self._regroup()

    def _make_averaging(self) -> Averaging:
        parameters = dict(zip(self.names, self.parameters))
        if self._models > 1 and self.algorithm.codec is not None:
            return EncodedAveraging(self.context, self._peers, parameters, self.algorithm)
        if self._models > 1 and self.algorithm.aggregate == "gradients":
            return Movements(parameters)
        return MeanOfModels()

    def _regroup(self) -> None:
        """Average gradients over the group or, until groups train separately, over all ranks."""
        if self._shards is not None:
            self._shards.across = None if self._alone or self._models == 1 else self._peers
            return
        if not self._alone or self.asked.group_size > 1:
            self.reduce_within(self._group if self._alone else self.settings.process_set)
        elif self.reducer is not None:
            self.reducer.release()
            self.reducer = None

    def renew(self) -> None:
        # Some ranks may have taken the step after which groups train separately, and others not.
        self._alone = self._alone_anywhere()
        self._loaded = {}
        self._averaging.restart()
        super().renew()
        # All models have just been averaged. All ranks count from the step of the furthest rank, so that no rank skips
        # an averaging.
        self._averaged = max(self._averaged, self._most_steps)
        self._first_open_round = 0
        if self.active:
            self._note_models()

    def _alone_anywhere(self) -> bool:
        """Return whether groups train separately on any rank. Collective."""
        mine = torch.tensor([int(self._alone)], device=HOST)
        return bool(allreduce(mine, op=Max, name="local.alone", process_set=self.settings.process_set))

    # ---- the step ----------------------------------------------------------------------------------------------

    def complete(self) -> None:
        if self._gathering is not None:
            self._gathering.complete()

    def drain(self, optimizer: torch.optim.Optimizer) -> None:
        self.complete()

    def detach(self) -> None:
        if self._gathering is not None:
            self._gathering.close()
        super().detach()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._gathering is not None:
            self._gathering.complete()
        rate = optimizer.param_groups[0].get("lr")
        if rate is not None:
            self._rate = float(rate)
            self._highest_rate = max(self._highest_rate, self._rate)
        elif self.algorithm.start == "decay":
            raise UsageError("LocalSGD(start='decay'): needs a learning rate, and the first parameter group has no lr")
        self._prepare(optimizer)
        self._note_models()
        if self._shards is not None:
            self._shards.trial = None if self._tried else functools.partial(self._try, optimizer, self._shards)

    def _try(self, optimizer: torch.optim.Optimizer, shards: ShardedReducer) -> None:
        self._tried = Trial(shards, self.settings.process_set).conclusive(optimizer)

    @torch.no_grad()
    def _note_models(self) -> None:
        """Begin to count the changes of new tensors. With a codec, collective over the peers.

        Newly unfrozen parameters are new tensors, which no group has changed yet.
        """
        if self._alone and self._averaging.counts_changes:
            self._averaging.note(self._values, self._pieces)

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """With exchange="sharded", make the shards and convert the optimizer's state to slices."""
        if self._shards is None:
            return
        self._shards.prepare()
        # State of whole parameters is from before the optimizer was wrapped, or a script created it by reading.
        if not optimizer.state.keys().isdisjoint(self._shards.parameters):
            take_over_state(optimizer, self._shards)

    def after_step(self) -> None:
        self.steps += 1
        due = self._alone and self.steps - self._averaged >= self.interval
        if self.settings.finite is not None and (due or self._shards is not None):
            self._judge_all()
        logged = self.algorithm.log_distance is not None and self.steps % self.algorithm.log_distance == 0
        if logged and self.steps > self._most_steps:  # not in a step that only some ranks repeat after a loss
            self.distances.append((self.steps, self._distance()))
        if due:
            self.exchange(self._averages() if self.context.survives_losses else (), self._average)
        if self._gathering is not None:
            self._gathering.start()
        elif self._shards is not None:
            self._shards.hand_out()
        if not self._alone and self._starts():
            self._alone = True
            self._averaged = self.steps
            self._regroup()

    def _judge_all(self) -> None:
        self.settings.judge(self.exchanged_names, self.exchanged)

    def _starts(self) -> bool:
        start = self.algorithm.start
        return self._rate < self._highest_rate if start == "decay" else self.steps >= int(start)

    def _values(self) -> list[torch.Tensor]:
        """Return the tensors that this rank averages with its peers."""
        if self._shards is not None:
            return self._shards.owned
        if self._arena is None:
            return []
        self._arena.adopt()
        return [run for _, run in self._arena.runs]

    def _pieces(self) -> Iterator[Elements]:
        """Yield the parameters, or the parts of them, that are in the tensors of `_values`."""
        if self._shards is not None:
            for number, piece in self._shards.slices().items():
                whole = self.parameters[number].numel()
                yield Elements(self.names[number], piece.begin, piece.end, whole, piece.values.detach())
            return
        left_out = set(self._frozen or ())
        for number, (name, parameter) in enumerate(zip(self.names, self.parameters)):
            if number not in left_out:
                whole = parameter.numel()
                yield Elements(name, 0, whole, whole, in_memory_order(parameter.detach()))

    def _averages(self) -> list[torch.Tensor]:
        """Return the tensors that an averaging changes, which include buffers."""
        models = self._values() or [parameter.detach() for parameter in self.trained]
        return [*models, *(buffer for _, buffer in self.buffers)]

    @torch.no_grad()
    def _average(self) -> None:
        self._averaged = self.steps
        values = self._values() if self._models > 1 else []
        self._averaging.average(values, functools.partial(self._reduce_models, values))
        if self._arena is not None:
            self._arena.give_back()
        if self.buffers:
            tensors = [buffer for _, buffer in self.buffers]
            take_mean(tensors, "local.buffers", self.settings.process_set)

    def _distance(self) -> float:
        """Return D = (1/P) sum over groups of |w_i - mean w|_2, the same on all ranks. Source: equation 9."""
        if self._models == 1:
            return 0.0
        values = self._values()
        means = [value.clone() for value in values]
        self._reduce(means, Average)
        squares = sum(squared_distance(value, mean) for value, mean in zip(values, means))
        total = torch.tensor([squares], dtype=torch.float64, device=HOST)
        if self._shards is not None:
            total = allreduce(total, op=Sum, name="local.squares", process_set=self._group)
        return float(allreduce(total.sqrt(), op=Average, name="local.distance", process_set=self._peers))

    def _reduce_models(self, values: list[torch.Tensor], op: int) -> None:
        """Reduce the models among peers, in place. Their memory does not move, so the reduction is prepared once."""
        if not values:
            return
        if self._prepared is None or self._prepared[0] != len(values):
            reduction = PreparedReduction(self.context, values, op, "local.models", self._peers)
            self._prepared = (len(values), reduction)
        self._prepared[1].run()

    def _reduce(self, values: list[torch.Tensor], op: int) -> None:
        if values:
            grouped_allreduce_(values, op=op, name="local.models", process_set=self._peers)

    # ---- the interval ------------------------------------------------------------------------------------------

    def report_metric(self, loss: float, rate: float | None) -> None:
        """Average the loss over all workers and, once per block, set the interval. Collective.

        Raises:
            UsageError: the algorithm has no `adaptive`, or the optimizer no learning rate.
        """
        adaptive = self.algorithm.adaptive
        if adaptive is None:
            raise UsageError("report_metric() has no effect without LocalSGD(adaptive=AdaptiveInterval(...))")
        if rate is None:
            raise UsageError("LocalSGD(adaptive=...): needs the learning rate, and the first parameter group has no lr")
        if not self.active:
            return
        mine = torch.tensor([loss], dtype=torch.float64, device=HOST)
        mean = float(allreduce(mine, op=Average, name="local.metric", process_set=self.settings.process_set))
        if not (math.isfinite(mean) and mean > 0):
            return
        if self._first_metric is None:
            self._first_metric = (rate, mean)
            self._block_ends = self.steps + adaptive.block
        elif self.steps >= self._block_ends:
            first_rate, first_loss = self._first_metric
            ratio = mean / first_loss * (first_rate / rate if rate > 0 else 1.0)
            wanted = max(1, math.ceil(self.algorithm.interval * math.sqrt(ratio)))
            self.interval = wanted if wanted < self.interval else max(1, self.interval // 2)
            self._block_ends = self.steps + adaptive.block

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @property
    def optional_state(self) -> frozenset[str]:
        # They exist with a codec or aggregate="gradients", from the first step of separate groups on.
        return frozenset({"outer", "residuals"})

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Collective within a group if exchange="sharded" and changes of models are averaged."""
        group = None if self._shards is None else self._group
        return {
            **self._loaded,
            **self._averaging.state(self._values, self._pieces, group),
            "steps": self.steps,
            "alone": self._alone,
            "averaged": self._averaged,
            "interval": self.interval,
            "highest_rate": self._highest_rate,
            "first_metric": self._first_metric,
            "block_ends": self._block_ends,
        }

    def state_of_copies(self) -> dict[str, Any]:
        if self._shards is not None and self._averaging.begun:
            raise only_a_part(self.algorithm)
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        was_alone = self._alone
        self.steps, self._alone, self._averaged = state["steps"], state["alone"], state["averaged"]
        if not self._alone and self.algorithm.start in ("immediate", 0):  # the state is of another `start`
            self._alone, self._averaged = True, self.steps
        self._highest_rate = state["highest_rate"]
        self._first_metric, self._block_ends = state["first_metric"], state["block_ends"]
        adapted = self.algorithm.adaptive is not None and self._first_metric is not None
        self.interval = state["interval"] if adapted else self.algorithm.interval
        loaded = {key: state[key] for key in self.optional_state if key in state}
        if self._met:
            self._averaging.load_state(loaded)
            loaded = {}
        elif self.algorithm.codec is None:
            drop_residuals(loaded)
            loaded.pop("residuals", None)
        self._loaded = loaded
        if self._met and was_alone != self._alone:
            self._regroup()

    def take_over(self, old: Strategy) -> None:
        super().take_over(old)
        self.distances = old.distances
        # A rank that has joined does not know yet that groups train separately, but the others send it state in groups.
        if self.active and self._met and self._alone_anywhere() and not self._alone:
            self._alone = True
            self._regroup()

    def forget_loaded(self) -> None:
        self._loaded = {}

    def _meet_anew(self, optimizer: torch.optim.Optimizer) -> None:
        averaged = self._averaged
        super()._meet_anew(optimizer)
        self._averaged = averaged  # meeting again averages changes, but must not postpone the next averaging

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        self.complete()
        if self._met and self._alone and self.algorithm.aggregate == "gradients" and self._averaging.begun:
            self._judge_all()
            with self._rollback.around(self._averages()):
                self._average()
            if self._shards is not None:
                self._shards.hand_out()
        self.level_frozen()
        if self._shards is not None:
            optimizer.load_state_dict(self.optimizer_state(optimizer))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict for whole parameters. Collective within a group if it is sharded."""
        if self.active and self.algorithm.sharded:
            self.meet()
        if self._shards is None:
            return super().optimizer_state(optimizer)
        self._prepare(optimizer)
        return gather_state(optimizer, self._shards)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a state dict for whole parameters. Collective within a group if it is sharded."""
        if self.active and self.algorithm.sharded:
            self.meet()
        if self._shards is None:
            super().load_optimizer_state(optimizer, state)
            return
        self._prepare(optimizer)
        scatter_state(optimizer, self._shards, state)
