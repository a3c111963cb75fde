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

SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")
"""The shells of shtab, the library that writes the scripts. Stated here, because no other command needs shtab."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sordino completion`."""
    parser.add_argument("shell", choices=SHELLS, help="name of the shell")


def main(options: argparse.Namespace) -> int:
    """Print the completion script for a shell.

    Raises:
        UsageError: shtab is missing, or is an older version that does not know the shell.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise UsageError("sordino completion needs the package shtab: pip install shtab") from error
    if options.shell not in shtab.SUPPORTED_SHELLS:
        known = ", ".join(shtab.SUPPORTED_SHELLS)
        raise UsageError(
            f"shtab {shtab.__version__} knows {known}, and not {options.shell}: pip install --upgrade shtab"
        )
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
