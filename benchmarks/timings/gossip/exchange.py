"""One gossip exchange of ResNet-50's parameters, against all-reduces of as many bytes and the memory floor.

  mpirun -np 4 python benchmarks/gossip.py exchange

Contestants, each with its own memory. Each is checked by one exchange, which must keep the sum over the ranks.
  crossover_blocks, crossover_model   Crossover of the blocks, and of the whole model as one segment
  hierarchical                        Crossover among groups of two ranks, with four ranks or more (two: AllReduce)
  push-sum, dpsgd                      PushSum and D-PSGD
  allreduce                           sordino allreduce_(op=Average) of one hvd.shared_empty tensor, in place
  horovod                             horovod.torch.allreduce_(op=Average) of one tensor
  floor                               no communication: all ranks at once read and write their own array, in place
  three_passes                        the same and a read of a second array, as a rank needs to mix without help
An exchange is a step of DistributedOptimizer around an SGD whose parameters have no gradients, so it contains no other
work; groups do not reduce gradients. Horovod is initialized only for its turns, because its thread disturbs others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

import sordino.torch as hvd
from sordino._core import kernels
from sordino.algorithms import DPSGD, Algorithm, Crossover, PushSum
from sordino.bench import baselines, command_line
from sordino.bench.baselines import Baselines
from sordino.bench.resnet import resnet50_shapes
from sordino.report import Results, machines, records, verdicts
from sordino.runtime.collectives.operation import Sum
from sordino.runtime.dtypes import DTYPE_CODES
from sordino.timing import Participants, Watch, race
from timings.gossip.report import REPORTS

_GROUP = 2


@dataclass
class Contestant:
    """One way to mix the tensors of the ranks.

    Attributes:
        tensors: tensors to mix.
        run: one blocking exchange.
        equal: number of neighboring ranks whose values are equal before an exchange.
    """

    tensors: list[torch.Tensor]
    run: Callable[[], object]
    equal: int = 1

    @torch.no_grad()
    def is_right(self, participants: Participants) -> bool:
        """Run one exchange on known input; return whether it changed every value and kept the sums. Collective."""
        values = [float(rank // self.equal + 1) ** 2 for rank in range(participants.size)]
        for tensor in self.tensors:
            tensor.fill_(values[participants.rank])
        self.run()
        wrong = False
        for number, tensor in enumerate(self.tensors):
            total = hvd.allreduce(tensor, op=hvd.Sum, name=f"bench.total.{number}")
            kept = torch.allclose(total, torch.full_like(total, sum(values)), rtol=1e-5)
            wrong |= not kept or bool((tensor == values[participants.rank]).any())
        return bool(participants.maximum(np.array([float(wrong)]))[0] == 0)


def _gossip(algorithm: Algorithm) -> Contestant:
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in resnet50_shapes()]
    parameters = [parameter for _, parameter in named]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named, algorithm=algorithm)

    def run() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    return Contestant(list(parameters), run, algorithm.workers_in_group)


def _allreduce(count: int) -> Contestant:
    tensor = hvd.shared_empty(count, dtype=torch.float32)
    return Contestant([tensor], lambda: hvd.allreduce_(tensor, name="bench.arena", op=hvd.Average))


def _horovod(found: Baselines, count: int) -> Contestant:
    tensor = torch.zeros(count)
    horovod = found.horovod
    return Contestant([tensor], lambda: horovod.allreduce_(tensor, name="bench.horovod", op=horovod.Average))


def _passes(count: int) -> dict[str, Contestant]:
    """Return the contestants that read and write private memory only."""
    own, other = torch.full((2, count), 1.5)
    places = [own.data_ptr(), other.data_ptr()]
    code = DTYPE_CODES[torch.float32]
    return {
        "floor": Contestant([own], lambda: kernels.scale(code, places[0], count, -1.0)),
        "three_passes": Contestant(
            [own, other], lambda: kernels.reduce(Sum, code, places, places[:1], count, 1.0, 0.5)
        ),
    }


def algorithms(size: int) -> dict[str, Algorithm]:
    """Return the gossip algorithms for this number of ranks. Groups of two need 4, 6, ... ranks."""
    found: dict[str, Algorithm] = {
        "crossover_blocks": Crossover(segments="blocks"),
        "crossover_model": Crossover(segments="model"),
        "hierarchical": Crossover(group_size=_GROUP),
        "push-sum": PushSum(),
        "dpsgd": DPSGD(),
    }
    if size <= _GROUP or size % _GROUP:
        del found["hierarchical"]
    return found


def measure(count: int, found: Baselines, participants: Participants, budget: float, rounds: int) -> dict[str, Results]:
    """Time every contestant on `count` parameters. Collective."""
    contestants = {name: _gossip(algorithm) for name, algorithm in algorithms(participants.size).items()}
    contestants["allreduce"] = _allreduce(count)
    if found.horovod is not None:
        contestants["horovod"] = _horovod(found, count)
    right = {}
    for name, one in contestants.items():
        with found.horovod_turn() if name == "horovod" else nullcontext():
            right[name] = one.is_right(participants)
    contestants |= _passes(count)
    runs = {name: one.run for name, one in contestants.items()}
    samples = race(runs, participants, budget, rounds=rounds, turns={"horovod": found.horovod_turn})
    return {name: samples[name].summary() | {"right": right.get(name, True)} for name in contestants}


def targets(results: Results) -> list[Results]:
    """Return the targets. Crossover sends at most as much as an all-reduce, so it must not take longer."""
    entries = []
    for key, label in (("crossover_blocks", "Crossover by blocks"), ("crossover_model", "Crossover by model")):
        for other, name in (("allreduce", "our all-reduce"), ("horovod", "Horovod's all-reduce")):
            what = f"{label}: not slower than {name}"
            entries.append(verdicts.target(what, verdicts.ratio(results, other, key), 1.0, at_least=True))
        for other, name in (("floor", "the floor"), ("three_passes", "three passes")):
            what = f"{label}: against {name}"
            entries.append(verdicts.target(what, verdicts.ratio(results, key, other), 1.5, at_least=False))
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on all ranks. Status 1 if a contestant has a wrong result."""
    options = command_line.parser("gossip exchange", __doc__, 60.0, "run")
    options.add_argument("--baselines", default="horovod", metavar="LIST", help="horovod, or none")
    chosen = options.parse_args(argv)
    names = [name for name in baselines.parse_names(chosen.baselines) if name == "horovod"]
    torch.set_num_threads(1)
    participants, library = baselines.start()
    if participants.size == 1:
        records.log("gossip: an exchange needs two ranks at least: mpirun -np 2 python benchmarks/gossip.py exchange")
        hvd.shutdown()
        return 2
    found_machine, watch = machines.machine(library), Watch(participants)
    found = baselines.open_all(names, participants)
    count = sum(int(np.prod(shape)) for _, shape in resnet50_shapes())
    budget, rounds = (1.0, 5) if chosen.quick else (chosen.budget, 40)
    entries = measure(count, found, participants, budget, rounds)
    found_machine["others"] = watch.others()
    found.close()
    wrong = [name for name, one in entries.items() if not one["right"]]
    if participants.rank == 0:
        results: Results = {
            "benchmark": "gossip_exchange",
            "name": f"gossip_exchange_np{participants.size}",
            "machine": found_machine,
            "ranks": participants.size,
            "nodes": hvd.cross_size(),
            "parameters": count,
            "baselines": found.notes,
            "contestants": entries,
            "wrong": wrong,
        }
        results["targets"] = targets(results)
        records.publish(results, command_line.results_folder(chosen), REPORTS)
        for name in wrong:
            records.log(f"wrong result: {name}")
    hvd.shutdown()
    return 1 if wrong else 0
