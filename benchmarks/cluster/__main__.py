"""Runs one job on a cluster that lives as long as the job does, by mpirun or by a torchrun on each host.

  cd benchmarks && python -m cluster --hosts 4 --mbps 1000 --ranks-per-host 1 -- python train.py
  cd benchmarks && python -m cluster --hosts 2 --ranks-per-host 2 --starter torchrun -- python train.py
  cd benchmarks && python -m cluster --hosts 4 --mbps 1000,1000,10000,10000 -- python train.py

The exit status is the job's; 2 if the command line is wrong or no cluster can be made here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cluster import Cluster
from sordino.errors import NotBuilt, UsageError


def _rates(text: str) -> float | list[float]:
    """One rate for all, or those of the hosts."""
    found = [float(part) for part in text.split(",")]
    return found if len(found) > 1 else found[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job and returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    # argparse treats `--` differently from one Python version to the next, so it never sees it.
    cut = words.index("--") if "--" in words else len(words)
    command = words[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m cluster --hosts N [options] -- COMMAND [ARGUMENT ...]", allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, required=True, metavar="N", help="how many hosts")
    parser.add_argument("--mbps", type=_rates, metavar="RATE", help="of each link, each way, or RATE,RATE,... of the "
        "hosts' one after the other (default: unlimited)")  # fmt: skip
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="(default 1)")
    parser.add_argument("--starter", choices=("mpirun", "torchrun"), default="mpirun", help="of the ranks: with "
        "torchrun they meet at torch's store, and UCX is between the hosts (default mpirun)")  # fmt: skip
    options = parser.parse_args(words[:cut])
    if not command:
        parser.error("no command; write it after `--`")
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
