"""Prints what `pip install sordino[EXTRA,...]` would bring along, less sordino itself: `requirements.py EXTRA...`.

So it can be downloaded while sordino is being compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # scikit-build-core brings it


def main() -> None:
    """Prints one requirement a line."""
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    print(
        "\n".join(
            dict.fromkeys([*project["dependencies"], *(line for extra in sys.argv[1:] for line in extras[extra])])
        )
    )


if __name__ == "__main__":
    main()
