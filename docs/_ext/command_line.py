"""The commands of `sordino`, as their parsers describe them: a section each, with what `--help` prints."""

from __future__ import annotations

import argparse

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from sordino.cli import app as commands

_WIDTH = 100


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A terminal of a width that does not depend on where the site is made."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_WIDTH)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by its name; of `sordino` itself first."""
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
