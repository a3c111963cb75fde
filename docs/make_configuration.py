"""Writes docs/configuration.md from the core's own table: python docs/make_configuration.py"""

from __future__ import annotations

from pathlib import Path

from sordino._core import variables

HEADER = """# Configuration

Every environment variable that Sordino reads. (Made by docs/make_configuration.py from csrc/base/config.cc.)

| variable | also read as | default | meaning |
|---|---|---|---|
"""


def text() -> str:
    """The page."""
    rows = [
        f"| `{name}` | {f'`{alias}`' if alias else ''} | {default or '(unset)'} | {meaning} |"
        for name, alias, default, meaning in variables()
    ]
    return HEADER + "\n".join(rows) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("configuration.md").write_text(text())
