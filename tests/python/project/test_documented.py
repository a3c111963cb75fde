"""Every error and setting for users has a name, a module to import it from, and a line in the documents."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sordino
import sordino.torch as hvd
from sordino import _core
from sordino.algorithms import Layered
from sordino.errors import SordinoError, UsageError
from sordino.torch.start import survives_losses

ROOT = Path(__file__).resolve().parents[3]
# These need frameworks that are not installed here.
FRAMEWORKS = {f"sordino.integrations.{name}" for name in ("accelerate", "lightning", "transformers")}
# Benchmarks may need packages that are not installed, and no user code catches errors of the package's programs.
LIBRARY = [
    module.name
    for module in pkgutil.walk_packages([str(ROOT / "python" / "sordino")], "sordino.")
    if not module.name.startswith(("sordino.bench", "sordino.cli", "sordino._core", "sordino.libsordino"))
    and module.name not in FRAMEWORKS
]


def subclasses(kind: type[SordinoError]) -> set[type[SordinoError]]:
    return {kind}.union(*(subclasses(one) for one in kind.__subclasses__()))


def test_every_error_is_exported_and_documented() -> None:
    for name in LIBRARY:
        importlib.import_module(name)
    page = (ROOT / "docs" / "errors.md").read_text()
    found = {kind for kind in subclasses(SordinoError) if kind.__module__.startswith("sordino")}
    assert len(found) > 10
    for kind in found:
        for place in (sordino, hvd):
            assert getattr(place, kind.__name__) is kind
            assert kind.__name__ in place.__all__
        assert f"`{kind.__name__}" in page or f"`sordino.{kind.__name__}" in page


def test_errors_need_no_core_and_no_torch() -> None:
    """`sordino doctor`, and an `except` at the top of a script, get them before anything else is loaded."""
    program = (
        "import sys, sordino; sordino.StepOrderError; print('torch' in sys.modules, 'sordino._core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr


def sources() -> dict[str, str]:
    """Return the Python files of the package, except for benchmarks, whose parts have variables of their own."""
    root = ROOT / "python" / "sordino"
    found = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    return {name: text for name, text in found.items() if not name.startswith("bench/")}


def test_every_variable_that_the_package_uses_is_on_the_page() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    used = {name for text in sources().values() for name in re.findall(r'["\'{](SORDINO_[A-Z_]+[A-Z])["\'}]', text)}
    assert {"SORDINO_RESTART", "SORDINO_ON_PEER_LOST"} <= used
    assert not [name for name in sorted(used) if f"`{name}`" not in page]


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("raise", False), ("continue", True)])
def test_on_peer_lost_has_one_reader(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv("SORDINO_ON_PEER_LOST", raising=False)
    if value is not None:
        monkeypatch.setenv("SORDINO_ON_PEER_LOST", value)
    assert _core.survives_losses() == survives_losses(None, None) == expected
    assert survives_losses("continue", None) and not survives_losses("raise", None)


def test_a_value_that_is_none_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_ON_PEER_LOST", "hope")
    with pytest.raises(UsageError, match="SORDINO_ON_PEER_LOST='hope' is not valid; set it to raise or continue"):
        survives_losses(None, None)
    monkeypatch.setenv("SORDINO_ON_PEER_LOST", "continue")
    with pytest.raises(UsageError, match="ranks that have no model"):
        survives_losses(None, Layered(communicator="rank"))


def test_its_name_is_in_one_place() -> None:
    """The core reads the variable. Launchers set it, and a job of one rank checks whether others may join it."""
    assert [name for name, text in sources().items() if '"SORDINO_ON_PEER_LOST"' in text] == [
        "rendezvous/environment.py"
    ]
