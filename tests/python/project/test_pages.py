"""The pages are true: Python snippets run, commands parse, and figures are those of the cited results.

A snippet runs on two ranks (threads). A fragment finds the names that the text around it mentions, as for its reader.
`make docs` checks links and names within the site.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import sordino.algorithms
import sordino.torch as hvd
from _ext import docstrings, figures, links
from make_pages import LOSSES, MAKERS, limits_of_results, losses, made
from sordino import _core, checkpoint, sim
from sordino.algorithms import class_of
from sordino.cli import app
from sordino.errors import NonFinite, SordinoError
from sordino.log.core import listen

ROOT = Path(__file__).resolve().parents[3]
MADE = ("docs/claims", "docs/kernels.md")  # made by commands, whose tests compare them
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "benchmarks/*/README.md")
    for path in ROOT.glob(pattern)
    if not str(path.relative_to(ROOT)).startswith(MADE) and path.name != "_contents.md"
)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

BEFORE = """
import torch
import sordino.torch as hvd
model = torch.nn.Linear(4, 1)
optimizer = opt = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(2, 4)).square().mean()
lr, steps, warmup_steps, step = 0.1, 100, 10, 7
"""
# Additional names for fragments of a page.
MORE = {
    "docs/errors.md": """
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), check_finite=True)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
(model(torch.ones(2, 4)) * (float("nan") if hvd.rank() == 1 else 1.0)).sum().backward()
""",
    "docs/compression.md": """
state = {"model": model.state_dict()}
""",
    "docs/faults.md": """
folder, state = checkpoint.Folder("shards"), {"total": torch.ones(8)}
""",
}
# By a word of the snippet: how to start its ranks, if they are not two of one machine.
STARTED: dict[str, dict[str, Any]] = {
    'communicator="rank"': {"size": 5, "algorithm": sordino.algorithms.Layered(group_size=4, communicator="rank")},
    'on_peer_lost="continue"': {"size": 2, "on_peer_lost": "continue"},
}


def fences(language: str) -> Iterator[tuple[str, str]]:
    """Yield the blocks of a language with their locations."""
    for page in PAGES:
        text = page.read_text()
        for found in FENCE.finditer(text):
            if found[1] == language:
                line = text.count("\n", 0, found.start()) + 2
                yield f"{page.relative_to(ROOT)}:{line}", found[2]


# A Python block of benchmarks/ needs a cluster (test_cluster.py), a block for a framework needs the framework
# (tests/frameworks), and a block for torch.distributed needs a launcher (test_distributed.py).
ELSEWHERE = ("benchmarks/", "docs/frameworks.md", "docs/torch-distributed.md")
PYTHON = [(place, text) for place, text in fences("python") if not place.startswith(ELSEWHERE)]
SHELL = list(fences("sh"))


def play(place: str, snippet: str) -> dict[str, Any]:
    """Run a snippet on this rank. Return the names that it has then."""
    names: dict[str, Any] = {**vars(sordino.algorithms), "NonFinite": NonFinite, "checkpoint": checkpoint}
    names["__name__"] = "__main__"
    page, _, line = place.rpartition(":")
    exec(compile(BEFORE + MORE.get(page, ""), f"what {place} finds", "exec"), names)
    exec(compile("\n" * (int(line) - 1) + snippet, str(ROOT / page), "exec"), names)
    return names


@pytest.mark.parametrize("place", [place for place, _ in PYTHON])
def test_a_snippet_runs(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snippet = dict(PYTHON)[place]
    monkeypatch.chdir(tmp_path)
    options = next((how for word, how in STARTED.items() if word in snippet), {"size": 2})
    monkeypatch.setattr(logging.getLogger("sordino"), "handlers", [*logging.getLogger("sordino").handlers])
    listen()  # its thread lasts until the process ends
    before = threading.active_count()
    found = sim.run(options["size"], play, place, snippet, **{k: v for k, v in options.items() if k != "size"})
    assert all(found) and threading.active_count() == before


def test_there_are_snippets_and_one_that_is_wrong_is_found() -> None:
    assert len(PYTHON) > 10 and len(SHELL) > 10
    with pytest.raises(NameError, match="no_such_name"):
        sim.run(1, play, "docs/start.md:1", "no_such_name\n")


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `sordino` command in a block, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and "=" in words[0]:  # environment variables
            words = words[1:]
        if words[:1] == ["sordino"]:
            yield words[1:]


@pytest.mark.parametrize("place", [place for place, text in SHELL if any(commands(text))])
def test_a_command_parses(place: str) -> None:
    for words in commands(dict(SHELL)[place]):
        mine = words[: words.index("--")] if "--" in words else words
        try:
            app._parser().parse_args(mine)
        except SystemExit:
            pytest.fail(f"{place}: sordino {' '.join(words)}")


@pytest.mark.parametrize(("place", "text"), SHELL, ids=[place for place, _ in SHELL])
def test_what_a_command_names_is_there(place: str, text: str) -> None:
    targets = set(re.findall(r"^([\w./$()-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"^make ([\w-]+)", text, re.MULTILINE):
        assert target in targets, place
    for path in re.findall(r"(?<![\w./-])(?:examples|benchmarks|tests|docs)/[\w/]+\.(?:py|sh|md)", text):
        assert (ROOT / path).exists(), f"{place}: {path}"


# --- Figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_are_those_of_the_results_that_they_cite(page: Path) -> None:
    assert figures.problems(page, page.read_text()) == []


def test_a_figure_that_is_wrong_or_cites_nothing_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "x.json").write_text('{"rows": [{"bytes": 4, "s": 0.0123}, {"bytes": 8, "s": 0.5}], "half": 2, "n": 4}')
    page = tmp_path / "page.md"

    def wrong(text: str) -> list[str]:
        return figures.problems(page, text)

    link = "benchmarks/results/x.json#rows/bytes=4/s"
    assert wrong(f'It takes [12 ms]({link}), or [12.3]({link} "ms").') == []
    assert wrong("Half: [50 %](benchmarks/results/x.json#half:n), [0.26 s](benchmarks/results/x.json#rows/*/s).") == []
    assert "which is 0.0123" in wrong(f"It takes [13 ms]({link}).")[0]
    assert "0 elements have bytes=5" in wrong("It takes [12 ms](benchmarks/results/x.json#rows/bytes=5/s).")[0]
    assert "is not a figure" in wrong(f"It takes [twelve]({link}).")[0]
    assert "'3 s' cites no result" in wrong(f"It takes [12 ms]({link}), and 3 s elsewhere.")[0]
    assert "'3 s' cites no result" in wrong("It takes 3 s ([table](benchmarks/results/x.md)).")[0]
    assert wrong("It waits for 3 s.") == []
    assert figures.on_the_site(f"[12 ms]({link})") == "[12 ms](benchmarks/results/x.md)"


def test_each_result_with_a_missed_limit_has_a_section() -> None:
    missed = [name for name, limits in limits_of_results().items() if any(one["met"] is False for one in limits)]
    page = (ROOT / "docs" / "missed-limits.md").read_text()
    assert re.findall("^## (.+)$", page, re.MULTILINE) == missed
    left_out = re.findall(r"^## (\w+)\n\(to be written\)$", page, re.MULTILINE)
    linked = re.findall(r"^\[The result\]\(\.\./benchmarks/results/(\w+)\.md\)", page, re.MULTILINE)
    assert sorted([*left_out, *linked]) == sorted(missed)


# --- Links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert links.problems(page, page.read_text()) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text('# One `two`: three\n<a id="here"></a>\n')
    page = tmp_path / "page.md"
    good = "[a](other.md), [b](other.md#one-two-three), [c](other.md#here), [d](#top), [e](https://arxiv.org/abs/1)"
    assert links.problems(page, f"# Top\n{good}\n") == []
    bad = "| [a](none.md) |\n|---|\n| [b](other.md#none) ![c](none.png) [d](#none) [e](https://example.org) |\n"
    said = links.problems(page, bad)
    assert [line.split()[1] for line in said] == [
        "none.md",
        "other.md#none",
        "none.png",
        "#none",
        "https://example.org",
    ]


# --- Parts of the site that are made from code ------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_has_of_the_code_is_what_the_code_says(page: Path) -> None:
    assert page.read_text() == made(page.read_text()), "python docs/make_pages.py writes it anew"


def test_blocks_are_made_and_what_is_for_the_site_is_seen_there_only() -> None:
    text = "a\n<!-- made: options crossover -->\nold\n<!-- end -->\nb\n"
    assert "| `interval` | `1` |" in made(text) and "old" not in made(text) and made(made(text)) == made(text)
    with pytest.raises(KeyError, match="no-such"):
        made(text.replace("options", "no-such"))
    whole = "".join(page.read_text() for page in PAGES)
    assert {found[1] for found in re.finditer("<!-- made: ([a-z]+)", whole)} == set(MAKERS)
    readers = re.sub(r"^<!-- on the site:\n.*?^-->$", "", whole, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^```\{([\w-]+)", readers, re.MULTILINE)) == {"eval-rst"}  # names of the API, in docs/api


@pytest.mark.parametrize("name", docstrings.shipped())
def test_an_algorithm_says_everything_and_has_a_page(name: str) -> None:
    kind = class_of(name)
    parts = docstrings.parts_of(kind)
    assert parts.idea and parts.sent and all(text.strip() for text in parts.facts.values())
    assert [option for option, _, _ in docstrings.settings(kind)] == [field.name for field in dataclasses.fields(kind)]
    page = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    assert f"```{{drawings}} {name}\n" in page
    for maker in ("idea", "costs", "options"):
        assert f"<!-- made: {maker} {name} -->\n" in page
    assert f"algorithms/{name}\n" in (ROOT / "docs" / "algorithms.md").read_text()


def test_a_docstring_that_says_too_little_is_an_error() -> None:
    class Silent(sordino.algorithms.AllReduce):
        """Says nothing."""

        hush: int = 1

    with pytest.raises(LookupError, match="lacks: Staleness, Memory, When a peer dies, Source"):
        docstrings.parts_of(Silent)


def test_the_api_has_every_name_of_the_facade() -> None:
    page = (ROOT / "docs" / "api" / "torch.md").read_text()
    errors = {name for name in hvd.__all__ if _is_error(getattr(hvd, name))}
    assert {"UsageError", "HorovodInternalError"} <= errors
    missing = [name for name in hvd.__all__ if name not in errors and not re.search(rf"(?<!\w){name}(?!\w)", page)]
    assert missing == []


def _is_error(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, SordinoError)


def test_the_losses_that_plan_cites_are_those_of_the_benchmark() -> None:
    assert LOSSES.read_text() == losses(), "python docs/make_pages.py writes it anew"


def test_the_number_of_algorithms() -> None:
    numbers = ["fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"]
    number = numbers[len(get_args(sordino.algorithms.AlgorithmName)) - 14]
    assert f"All-reduce is one of {number} algorithms." in (ROOT / "README.md").read_text()


def test_variables_of_horovod_are_all_named() -> None:
    """A reader must not take an ignored variable for one that is read."""
    read = {alias for _, alias, *_ in _core.variables() if alias}
    rows = [row for row in (ROOT / "docs/coming-from-horovod.md").read_text().splitlines() if "HOROVOD_" in row]
    assert set(re.findall(r"HOROVOD_\w+", "".join(rows))) == read
