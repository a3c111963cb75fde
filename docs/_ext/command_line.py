"""The commands of `sordino`, as their parsers describe them: one section each, with the output of `--help`."""

from __future__ import annotations

import argparse

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from sordino.cli import app as commands

_WIDTH = 100


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Formatter of a fixed width, so that the site does not depend on the terminal in which it is built."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_WIDTH)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by its name, beginning with `sordino` itself."""
    whole = commands._parser()
    found = {"sordino": whole}
    for action in whole._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {f"sordino {name}": parser for name, parser in action.choices.items()}
    return found


class CommandLine(SphinxDirective):
    """A section for each command."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for name, parser in parsers().items():
            parser.formatter_class = _Formatter
            section = nodes.section(ids=[name.replace(" ", "-")], names=[name])
            section += nodes.title("", "", nodes.literal(name, name))
            section += nodes.literal_block("", parser.format_help(), language="text")
            found.append(section)
        return found


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
