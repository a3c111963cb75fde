"""Argument parser of the command `sordino`, and the conversion of errors into exit statuses."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import resources

from sordino.cli import bench, completion, doctor, examples, inspect, join, plan, report, run, simulate
from sordino.errors import SordinoError, UsageError
from sordino.suggestions import meant


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    Statuses: 0 success; 1 something is missing or failed; 2 the command line is wrong. `run` returns the status of the
    job (see `sordino.cli.run`).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Everything after the first `--` belongs to the command to run. It is cut off here, because Python versions
    # differ in how argparse treats `--`.
    command: list[str] | None = None
    if words[:1] in (["run"], ["join"]) and "--" in words:
        cut = words.index("--")
        words, command = words[:cut], words[cut + 1 :]
    parser = _parser()
    options, unknown = parser.parse_known_args(words)
    if unknown:
        own: argparse.ArgumentParser = options.own
        there = [option for action in own._actions for option in action.option_strings]
        own.error(f"unrecognized arguments: {' '.join(unknown)}{meant(unknown[0].partition('=')[0], there)}")
    if command is not None:  # a second `--`, or one after the program, belongs to the program
        options.command = [*options.command, "--", *command] if options.command else command
    _prepare_streams()
    try:
        chosen: Callable[[argparse.Namespace], int] = options.main
        return chosen(options)
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UsageError as error:
        print(f"sordino {options.subcommand}: {error}", file=sys.stderr)
        return 2
    except SordinoError as error:
        print(f"sordino {options.subcommand}: {error}", file=sys.stderr)
        return 1


def _prepare_streams() -> None:
    """Prepare stdin, stdout and stderr for any output, in any locale.

    A stream that the caller has closed (`>&-`) becomes /dev/null, because files would get its descriptor otherwise. A
    character that the locale lacks is written as an escape sequence.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tests replace it
            stream.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sordino", description="Data-parallel training for PyTorch with less communication.", allow_abbrev=False
    )
    # Not by importlib.metadata, because a package that was copied into a folder has no metadata.
    version = resources.files("sordino").joinpath("VERSION").read_text(encoding="utf-8").strip()
    parser.add_argument("--version", action="version", version=f"Sordino {version}")
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for module, name, text in (
        (run, "run", "start a program on several ranks, on this machine or by mpirun on several"),
        (join, "join", "add a rank to a running job of this machine"),
        (doctor, "doctor", "check the installation, and print a fix for each problem"),
        (inspect, "inspect", "show which running ranks wait for which, and the stacks of the late ones"),
        (examples, "examples", "copy an example to start from"),
        (plan, "plan", "measure the links, and recommend an algorithm for training"),
        (simulate, "simulate", "train virtual workers in virtual time, over links of any speed"),
        (report, "report", "make an HTML page from the records of runs"),
        (bench, "bench", "run a benchmark: collectives, fusion or kernels"),
        (completion, "completion", "print a shell completion script"),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(main=module.main, parser=parser, own=command)
    return parser
