"""Prints a shell completion script for the commands and options of `sordino`.

  mkdir -p ~/.local/share/bash-completion/completions
  sordino completion bash > ~/.local/share/bash-completion/completions/sordino
  sordino completion zsh > ~/.zfunc/_sordino        # a folder of $fpath

Then open another shell. Words after the `--` of `sordino run` are completed as files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from sordino.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sordino completion`."""
    parser.add_argument("shell", help="name of the shell: bash, zsh, or another that shtab knows")


def main(options: argparse.Namespace) -> int:
    """Print the completion script for a shell."""
    import shtab  # no other command needs it

    if options.shell not in shtab.SUPPORTED_SHELLS:
        known = ", ".join(shtab.SUPPORTED_SHELLS)
        raise UsageError(f"unknown shell {options.shell!r}; there are completion scripts for {known}")
    for action in _actions(options.parser):
        if action.type is Path or action.metavar == "FILE" or action.dest == "command":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(options.parser, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
