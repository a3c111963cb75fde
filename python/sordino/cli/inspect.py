"""Shows which ranks on this machine wait for which, and the Python stacks of the late ones.

  sordino inspect                  # in a second terminal, while a job runs
  sordino inspect --threads        # with the stacks of all threads of all ranks
  sordino inspect --json           # all that the ranks say, for programs

It needs no option of the job, and works with every launcher. Ranks of other hosts answer on their host.
SORDINO_INSPECT=0 turns it off.
"""

from __future__ import annotations

import argparse
import json
import sys

from sordino.inspection.asking import ask_all
from sordino.inspection.text import described


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sordino inspect`."""
    parser.usage = "sordino inspect [options] [PID ...]"
    parser.add_argument("pids", nargs="*", type=int, metavar="PID",
        help="only these processes (default: all ranks of this user)")  # fmt: skip
    parser.add_argument("--threads", action="store_true", help="show the stacks of all threads of all ranks")
    parser.add_argument("--json", action="store_true", help="print the answers of the ranks as JSON")


def main(options: argparse.Namespace) -> int:
    """Ask the ranks and print their answers. Return 1 if no rank answers."""
    answers = ask_all(options.pids or None)
    if options.json:
        print(json.dumps(answers, indent=2))
    elif answers:
        print("\n".join(described(answers, options.threads)))
    if not answers:
        print(
            "sordino inspect: no ranks of this user have started here, or they have SORDINO_INSPECT=0. Ranks that "
            "still wait in init() do not answer; `sordino run` names the missing ones after SORDINO_STALL_WARN_S",
            file=sys.stderr,
        )
    return 0 if answers else 1
