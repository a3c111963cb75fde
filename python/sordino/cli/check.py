"""One line of the table of `sordino doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

REBUILD = "`pip install --force-reinstall --no-deps .` in a checkout of Sordino"


@dataclass(frozen=True)
class Check:
    """What was looked at, and what was found.

    Attributes:
        name: of it.
        status: "ok", "warn" (something cannot be used that others do without) or "fail".
        found: what there is.
        mend: empty when there is nothing to do.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    mend: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the fields, for JSON."""
        return asdict(self)
