"""Writes docs/configuration.md from the core's own table: python docs/make_configuration.py"""

from __future__ import annotations

from pathlib import Path

from sordino._core import variables

LAUNCHED = """
`sordino run` sets these for its ranks:

| variable | meaning |
|---|---|
| `SORDINO_RECORD` | what `--record` says, where it is given |
| `SORDINO_RESTART` | the number of this start of the job: 0, and with `--restarts` 1 and more |
| `SORDINO_ON_PEER_LOST` | what `--on-peer-lost` says, where it is given |
| `OMP_NUM_THREADS` | cores over ranks, where it is not set and mpirun does not start them (torchrun says 1) |
| `SORDINO_RANK`, `SORDINO_SIZE` | which rank it is, and of how many, where mpirun has not started it |
| `SORDINO_TOKEN` | the job's secret, which ranks show when they meet; with torchrun set it yourself |
| `SORDINO_RENDEZVOUS` | where they meet; not for scripts |
| `SORDINO_LAUNCHER` | where a rank tells that it has met the others, or goes on without one; not for scripts |
"""
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
    return HEADER + "\n".join(rows) + "\n" + LAUNCHED


if __name__ == "__main__":
    Path(__file__).with_name("configuration.md").write_text(text())
