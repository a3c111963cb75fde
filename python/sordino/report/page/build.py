"""Assembly of the page: the template with styles, scripts and data inserted.

A policy in the page forbids it to fetch anything, and to run any script except its own, which it names by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

SCRIPTS = ("draw.js", "charts.js", "sections.js", "main.js")


def asset(name: str) -> str:
    """Return the text of a file in `assets/`."""
    return (resources.files("sordino.report.page") / "assets" / name).read_text(encoding="utf-8")


def script() -> str:
    """Return the page's script."""
    return "'use strict';\n" + "\n".join(asset(name) for name in SCRIPTS)


def policy(live: bool) -> str:
    """Return the page's Content-Security-Policy, which forbids everything that it does not name.

    Args:
        live: whether the page may ask its own server for updates.
    """

    def named(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {named(script())}; style-src {named(asset('style.css'))}; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )


def page(runs: Sequence[dict[str, Any]], live: bool = False) -> str:
    """Return the HTML of the page.

    Args:
        runs: results of `contents`, one per run.
        live: whether the page is served while a run continues.
    """
    title = title_of([run["name"] for run in runs])
    parts = {
        "POLICY": html.escape(policy(live), quote=True),
        "TITLE": html.escape(title),
        "STYLE": asset("style.css"),
        "SCRIPT": script(),
        "DATA": embedded({"title": title, "live": live, "runs": list(runs)}),
    }
    return re.sub(r"@([A-Z]+)@", lambda found: parts[found[1]], asset("page.html"))


def title_of(names: Sequence[str]) -> str:
    """Return the title of the page for these runs."""
    return names[0] if len(names) == 1 else f"{len(names)} runs compared"


def embedded(value: Any) -> str:
    """Return JSON that cannot close the HTML element around it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
