"""Result of one check of `sordino doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

REBUILD = "`pip install --force-reinstall --no-deps .` in a checkout of Sordino"


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table.

    Attributes:
        name: subject of the check.
        status: "ok", "warn" (an optional feature cannot be used) or "fail".
        found: the finding.
        fix: the fix; "" if no fix is needed.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the fields, for JSON."""
        return asdict(self)
