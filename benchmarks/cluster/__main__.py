"""Run one job, by mpirun or by one torchrun per host, on a cluster that ends with the job.

  cd benchmarks && python -m cluster --hosts 4 --mbps 1000 --ranks-per-host 1 -- python train.py
  cd benchmarks && python -m cluster --hosts 2 --ranks-per-host 2 --starter torchrun -- python train.py
  cd benchmarks && python -m cluster --hosts 4 --mbps 1000,1000,10000,10000 -- python train.py

The exit status is the job's, or 2 if the command line is wrong or no cluster can be made here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cluster import Cluster
from sordino.errors import NotBuilt, UsageError


def _rates(text: str) -> float | list[float]:
    """Return one rate for all hosts, or a list with the rate of each host."""
    found = [float(part) for part in text.split(",")]
    return found if len(found) > 1 else found[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    # argparse treats `--` differently in different Python versions, so it is removed here.
    cut = words.index("--") if "--" in words else len(words)
    command = words[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m cluster --hosts N [options] -- COMMAND [ARGUMENT ...]", allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, required=True, metavar="N", help="number of hosts")
    parser.add_argument("--mbps", type=_rates, metavar="RATE", help="rate of each link in each direction, in "
        "Mbps; or RATE,RATE,... with one rate per host (default: unlimited)")  # fmt: skip
    parser.add_argument(
        "--ranks-per-host", type=int, default=1, metavar="N", help="number of ranks on each host (default 1)"
    )
    parser.add_argument("--starter", choices=("mpirun", "torchrun"), default="mpirun", help="launcher; "
        "with torchrun the ranks rendezvous at torch's store and use UCX between hosts (default mpirun)")  # fmt: skip
    options = parser.parse_args(words[:cut])
    if not command:
        parser.error("no command: add it after `--`")
    try:
        with Cluster(options.hosts, options.mbps) as cluster:
            ranks = options.hosts * options.ranks_per_host
            start = cluster.torchrun if options.starter == "torchrun" else cluster.run
            return start(ranks, command, capture=False).returncode
    except (NotBuilt, UsageError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
