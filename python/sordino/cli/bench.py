"""Runs one of Sordino's benchmarks: collectives, fusion or kernels. Arguments after its name go to the benchmark.

  sordino bench kernels --help
  sordino bench -np 2 collectives --contestants ordinary,openmpi

With -np it runs like `sordino run -np N -- sordino bench ...`, by mpirun if mpirun is installed. collectives starts its
ranks itself, once for each contestant and job. All other benchmarks are scripts in a clone, such as
`python benchmarks/gossip.py`; benchmarks/README.md lists them.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from sordino.cli import run
from sordino.errors import NotBuilt
from sordino.launcher import capacity

BENCHMARKS = ("collectives", "fusion", "kernels")
_STARTS_RANKS = ("collectives",)  # benchmarks that start their ranks themselves, and have an option --ranks
IN_A_CLONE = (
    "cache_lines",
    "frontier",
    "fsdp",
    "gossip",
    "gpu_kernels",
    "gpu_ranks",
    "gpu_step",
    "joining",
    "scale",
    "layered",
    "local_sgd",
    "record",
    "single_copy",
    "soak",
    "soak_joins",
    "transports",
    "walk",
    "scheduled_pull",
)


class _Benchmark(Protocol):
    def main(self, argv: Sequence[str]) -> int | None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sordino bench`."""
    parser.usage = f"sordino bench [-np N] {{{','.join(BENCHMARKS)}}} [ARGUMENT ...]"
    parser.add_argument("-np", dest="ranks", type=int, metavar="N", help="number of ranks (default: this process only)")
    parser.add_argument("name", type=_name, choices=BENCHMARKS, help="name of the benchmark")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the benchmark (--help lists them)")


def _name(text: str) -> str:
    if text in IN_A_CLONE:
        raise argparse.ArgumentTypeError(
            f"{text} is not in the package; run it from a clone: python benchmarks/{text}.py"
        )
    return text


def main(options: argparse.Namespace) -> int:
    """Run the benchmark in this process or, with -np, on that number of ranks.

    Raises:
        NotBuilt: this installation lacks the benchmark.
        UsageError: the machine has no room for that number of ranks.
    """
    arguments = options.arguments
    if options.ranks is not None and options.name in _STARTS_RANKS:
        capacity.check(options.ranks, (), (), {}, capacity.this_machine(), oversubscribe=False)
        arguments = ["--ranks", str(options.ranks), *arguments]
    elif options.ranks is not None:
        # The benchmark compares with MPI.
        return run.plain(options.ranks, ["sordino", "bench", options.name, *options.arguments], prefers_mpi=True)
    module = f"sordino.bench.{options.name}"
    try:
        benchmark = cast(_Benchmark, importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name == "sordino._core":
            raise NotBuilt("Sordino's core is not built; `sordino doctor` says how to fix that") from error
        if error.name not in (module, "sordino.bench"):
            raise NotBuilt(f"the benchmark {options.name} needs {error.name}: pip install {error.name}") from error
        raise NotBuilt(f"this installation has no benchmark {options.name} ({module} is missing)") from error
    return benchmark.main(arguments) or 0
