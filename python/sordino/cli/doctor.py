"""Checks the installation: the build, installed libraries, problems, and their fixes.

The exit status is 1 if a check fails, else 0, also with warnings.
"""

from __future__ import annotations

import argparse
import json

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sordino.cli.check import Check
from sordino.cli.checks import all_checks

_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sordino doctor`."""
    parser.add_argument("--json", action="store_true", help="output as one JSON object")


def main(options: argparse.Namespace) -> int:
    """Run every check and show the results. Return 1 if a check fails, else 0."""
    checks = all_checks()
    failed = any(check.status == "fail" for check in checks)
    if options.json:
        print(json.dumps({"ok": not failed, "checks": [check.as_dict() for check in checks]}, indent=2))
    else:
        _show(checks)
    return 1 if failed else 0


def _show(checks: list[Check]) -> None:
    console = Console()
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("check", "status", "finding"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        # Text, not markup, because paths and error messages may contain brackets.
        found = Text(check.found)
        if check.fix:
            found.append(f"\n-> {check.fix}", style="bold")
        table.add_row(Text(check.name), Text(check.status, style=_STYLE[check.status]), found)
    console.print(table)
    counts = {status: sum(check.status == status for check in checks) for status in _STYLE}
    console.print(
        f"{counts['ok']} ok, {counts['warn']} warnings (warn), {counts['fail']} failures (fail)", highlight=False
    )
