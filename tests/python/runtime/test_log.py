"""Log lines: one logger, levels, ranks, lines of the core; no line is lost or printed twice."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import torch
from checks.commands import SORDINO
from pace import HANG_S

import sordino.torch as hvd
from sordino import _core, sim
from sordino.errors import UsageError
from sordino.log import NO_RANK, logger
from sordino.log.core import listen

# Start of a script whose log handler prints each line to stdout, as "got LEVEL rank text".
HANDLES = """
import ctypes, logging, os, sys, threading, torch
import sordino.torch as hvd
from sordino import _core, sim
from sordino.log import core
heard = threading.Event()
class Prints(logging.Handler):
    def emit(self, record):
        print("got", record.levelname, record.rank, record.getMessage(), flush=True)
        heard.set()
logging.getLogger("sordino").addHandler(Prints())
"""
# The same script, but the thread that hands over lines is blocked. So only the end of the script can hand them over.
BEHINDHAND = f"""{HANDLES}
hvd.init()
core._PATIENCE_S = 0.1
core._handing.acquire()
_core.say(logging.ERROR, hvd.rank(), "last words")
"""


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.heard.set()


@pytest.fixture
def records() -> Iterator[Records]:
    """The records that the logger `sordino` gets. Its level is restored afterwards."""
    handler, root = Records(), logging.getLogger("sordino")
    before = root.level
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)
    root.setLevel(before)


def run(program: str, *, ranks: int = 1, real: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script on some ranks.

    Args:
        program: the script.
        ranks: number of ranks.
        real: whether to use a real interpreter, which ends like any other, rather than a fork (tests/forked).
        **variables: additional environment variables.
    """
    forked.python()  # sets a variable
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_", "SORDINO_"))}
    words = [*([sys.executable] if real else forked.python()), "-c", program]
    if ranks > 1:
        words = [*SORDINO, "run", "--launcher", "local", "-np", str(ranks), "--", *words]
    return subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, env={**clean, **variables})


def stall(heard: threading.Event) -> None:
    """Let rank 1 come to an operation only after a handler has heard of the stall."""

    def body() -> None:
        if hvd.rank() == 1:
            heard.wait(HANG_S)
        hvd.allreduce(torch.ones(2), name="late")

    sim.run(2, body)


def test_a_stall_reaches_a_handler_with_its_level_and_rank(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is handed over while all ranks wait; otherwise this test hangs."""
    monkeypatch.setenv("SORDINO_STALL_WARN_S", "0.1")
    stall(records.heard)
    first = records.records[0]
    assert (first.name, first.levelno, first.rank) == ("sordino.core", logging.WARNING, 0)  # type: ignore[attr-defined]
    assert first.getMessage().startswith("stalled: allreduce 'allreduce.late' has waited ")


def test_lines_have_the_rank_that_says_them(records: Records) -> None:
    log = logger("sordino.testing")
    log.warning("outside")
    sim.run(3, lambda: log.warning("inside"))
    log.warning("of another", extra={"rank": 7})
    ranks = [(record.getMessage(), record.rank) for record in records.records]  # type: ignore[attr-defined]
    assert ranks[0] == ("outside", NO_RANK)
    assert sorted(ranks[1:-1]) == [("inside", rank) for rank in range(3)]
    assert ranks[-1] == ("of another", 7)


@pytest.mark.parametrize(("level", "kept"), [("DEBUG", 4), ("INFO", 3), ("WARNING", 2), ("ERROR", 1)])
def test_levels(records: Records, monkeypatch: pytest.MonkeyPatch, level: str, kept: int) -> None:
    monkeypatch.setenv("SORDINO_LOG_LEVEL", level)
    sim.run(1, lambda: None)
    log = logger("sordino.testing")
    for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        log.log(number, "said")
    assert len(records.records) == kept


def test_the_level_counts_for_lines_of_the_core(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_LOG_LEVEL", "ERROR")

    def body() -> None:
        _core.say(logging.WARNING, 0, "too low")
        _core.say(logging.ERROR, 0, "high enough")

    sim.run(1, body)
    assert [record.getMessage() for record in records.records] == ["high enough"]


def test_without_the_variable_the_level_is_the_scripts(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SORDINO_LOG_LEVEL", raising=False)
    logging.getLogger("sordino").setLevel(logging.INFO)
    listen()
    logger("sordino.testing").info("said")
    assert len(records.records) == 1


@pytest.mark.parametrize("value", ["loud", "warning", "30"])
def test_a_wrong_level_is_refused_with_the_choices(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SORDINO_LOG_LEVEL", value)
    with pytest.raises(
        UsageError, match=f"SORDINO_LOG_LEVEL='{value}' is not a log level; set it to DEBUG, INFO, WARNING or ERROR"
    ):
        hvd.init()


def test_by_default_a_line_is_printed_with_the_prefix() -> None:
    """A line of Python and a line of the core are printed once each."""
    program = "import sordino.torch as hvd; from sordino import _core; hvd.init(); _core.say(30, 0, 'from the core')"
    done = run(program, SORDINO_STALL_WARN="1")
    lines = [line for line in done.stderr.splitlines() if line.startswith("sordino: ")]
    assert [line[:30] for line in lines] == ["sordino: warning: SORDINO_STAL", "sordino: from the core"], done.stderr
    told = run("import sordino.torch as hvd; hvd.init()", SORDINO_LOG_LEVEL="DEBUG").stderr
    assert "sordino: ranks: 1, nodes: 1, transport: " in told and "sordino: rank 0 is process " in told


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_script_that_sets_up_logging_gets_each_line_once(when: str) -> None:
    words = 'import logging; logging.basicConfig(format="%(name)s %(rank)d %(message)s")'
    before, after = (words, "") if when == "before" else ("", words)
    program = f"""{before}
import sordino.torch as hvd
from sordino import _core
from sordino.log import core
{after}
hvd.init()
_core.say(30, 0, "from the core")
core.flush()
"""
    done = run(program)
    assert done.stderr.splitlines() == ["sordino.core 0 from the core"]


def test_a_forked_child_prints_its_own_lines_alone() -> None:
    """The parent's line waits while the child is forked."""
    program = f"""{BEHINDHAND}
child = os.fork()
if child == 0:
    hvd.shutdown()
    core.finish()
    _core.say(logging.WARNING, -1, "of the child")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    done = run(program)
    assert done.stdout.splitlines() == ["got ERROR 0 last words"], done.stdout + done.stderr
    assert done.stderr.splitlines().count("sordino: of the child") == 1, done.stderr


def test_a_forked_child_may_listen_itself() -> None:
    """The child's own thread hands over the line."""
    program = f"""{BEHINDHAND}
child = os.fork()
if child == 0:
    core.listen()
    _core.say(logging.WARNING, 0, "of the child")
    os._exit(0 if heard.wait(60) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    done = run(program)
    assert done.stdout.splitlines() == ["got WARNING 0 of the child", "got ERROR 0 last words"], done.stderr


ENDS = {
    "the end of the script": ("", 1, 0),
    "an uncaught error": ("raise RuntimeError('end')", 1, 1),
    "an uncaught error of a rank beside others": ("if hvd.rank() == 0: raise RuntimeError('end')\nhvd.barrier()", 2, 1),
    "sys.exit": ("sys.exit(3)", 1, 3),
    "shutdown": ("hvd.shutdown(); os._exit(4)", 1, 4),
    "a shutdown that fails at exit": (
        "from sordino.runtime import context\n"
        "class Fails:\n"
        "    def at_once(self): raise ValueError('cannot')\n"
        "fails = Fails()\n"
        "context.current().callbacks.on_shutdown.add(fails.at_once)\n"
        "context.flush = lambda: None",
        1,
        1,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_no_line_is_lost_at(end: str) -> None:
    words, ranks, status = ENDS[end]
    done = run(f"{BEHINDHAND}\n{words}", ranks=ranks, real=end == "the end of the script")
    assert done.returncode == status, done.stderr
    assert ("ValueError: cannot" in done.stderr) == (end == "a shutdown that fails at exit"), done.stderr
    assert "got ERROR 0 last words" in done.stdout.splitlines(), done.stdout + done.stderr


def test_a_line_after_shutdown_is_handed_over_at_exit() -> None:
    done = run(f"{BEHINDHAND}\nhvd.shutdown()\n_core.say(logging.ERROR, -1, 'after shutdown')")
    assert done.stdout.splitlines() == ["got ERROR 0 last words", "got ERROR -1 after shutdown"], done.stderr


def test_what_is_said_after_the_end_is_printed() -> None:
    done = run(f"{HANDLES}\nhvd.init()\ncore.finish()\n_core.say(logging.WARNING, 0, 'too late')")
    assert done.stderr.splitlines() == ["sordino: too late"]


def test_a_stall_is_printed_though_a_rank_holds_the_interpreter() -> None:
    """Rank 1 holds the interpreter until a line has been printed; the handler still gets the line afterwards."""
    program = f"""{HANDLES}
inside, outside = os.pipe()
os.dup2(outside, 2)
submitted = threading.Event()
def body():
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="late")
        submitted.set()
    else:
        submitted.wait()
        ctypes.PyDLL(None).read(inside, ctypes.create_string_buffer(1), 1)
        handle = hvd.allreduce_async(torch.ones(2), name="late")
    hvd.synchronize(handle)
sim.run(2, body)
os.close(outside); os.close(2)
print(os.read(inside, 10000).decode())
"""
    done = run(program, SORDINO_STALL_WARN_S="0.1")
    lines = done.stdout.splitlines()
    assert sum("ordino: stalled: allreduce 'allreduce.late'" in line for line in lines) == 1, done.stdout
    assert sum(line.startswith("got WARNING 0 stalled: allreduce 'allreduce.late'") for line in lines) == 1


def test_a_line_that_the_core_has_printed_is_not_printed_again() -> None:
    program = """
import ctypes, os
import sordino.torch as hvd
from sordino import _core
hvd.init()
inside, outside = os.pipe()
saved = os.dup(2)
os.dup2(outside, 2)
_core.say(30, 0, "said")
ctypes.PyDLL(None).read(inside, ctypes.create_string_buffer(1), 1)
os.dup2(saved, 2)
os.close(outside)
print(os.read(inside, 10000).decode())
"""
    done = run(program)
    # The thread may have handed it over before the interpreter was held.
    assert (done.stdout + done.stderr).count("ordino: said") == 1


def test_a_handler_that_raises_costs_no_line() -> None:
    program = f"""{HANDLES}
def fails(record):
    if record.getMessage() == "one":
        raise ValueError("a bad filter")
    return True
logging.getLogger("sordino").handlers[-1].addFilter(fails)
hvd.init()
_core.say(30, 0, "one")
_core.say(30, 0, "two")
"""
    done = run(program)
    assert done.returncode == 0 and done.stdout.splitlines() == ["got WARNING 0 two"]
    assert "sordino: one\n" in done.stderr and "a bad filter" in done.stderr


def test_a_handler_that_does_not_return_keeps_no_process_alive() -> None:
    program = """
import logging, threading
import sordino.torch as hvd
from sordino import _core
from sordino.log import core
core._PATIENCE_S = 0.1
entered = threading.Event()
class Hangs(logging.Handler):
    def handle(self, record):
        entered.set()
        threading.Event().wait()
logging.getLogger("sordino").addHandler(Hangs())
hvd.init()
_core.say(30, 0, "one")
entered.wait()
_core.say(30, 0, "two")
"""
    done = run(program)
    assert done.returncode == 0 and done.stderr.splitlines() == ["sordino: two"]


def test_lines_of_python_do_not_depend_on_the_core() -> None:
    """As when `sordino doctor` reports a core that cannot be imported."""
    program = """
import sys
sys.modules["sordino._core"] = None
from sordino.log import logger
logger("sordino").error("x")
"""
    done = run(program, real=True)
    assert done.stderr == "sordino: x\n"


def test_no_module_of_the_library_prints() -> None:
    """Log lines go through the logger; only commands print."""
    package = Path(sys.modules["sordino"].__file__ or "").parent
    folders = ("algorithms", "checkpoint", "rendezvous", "record", "runtime", "torch")
    for path in sorted(one for folder in folders for one in (package / folder).rglob("*.py")):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not any(isinstance(one, ast.Name) and one.id == "print" for one in calls), path
