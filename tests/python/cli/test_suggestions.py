"""Misspelt names of options, algorithms and variables: the message suggests the right one."""

from __future__ import annotations

import pytest

import sordino.algorithms
from sordino.cli.app import main
from sordino.errors import UsageError
from sordino.suggestions import meant, misspelt_variables


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--recrod", "x", "-np", "2", "--", "true"], "did you mean --record?"),
        (["plan", "--budgte=3"], "did you mean --budget?"),
        (["simulate", "--algorithm", "localsgd"], "did you mean local-sgd?"),
    ],
    ids=lambda words: words[0],
)
def test_the_nearest_name_is_told(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(words) == 2
    except SystemExit as end:
        assert end.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert "usage: " not in told or f"usage: sordino {words[0]}" in told


def test_nothing_is_told_where_nothing_is_near() -> None:
    assert meant("quux", ["--record", "--budget"]) == ""
    with pytest.raises(UsageError, match=r"did you mean local-sgd\?"):
        sordino.algorithms.class_of("local_sgd")


def test_a_variable_that_nobody_reads_is_told_of() -> None:
    known = ["SORDINO_TIMEOUT_S", "HOROVOD_TIMELINE"]
    mine = {"SORDINO_TIMOUT_S": "5", "SORDINO_RANK": "0", "SORDINO_MY_OWN_DATA": "1", "SORDINO_TIMEOUT_S": "3"}
    mine |= {"SORDINO_MIN_RANKS": "2", "SORDINO_NEWCOMER": "1"}
    (line,) = misspelt_variables(mine, known)
    assert misspelt_variables({"SORDINO_MIN_RANK": "3"}, known) == [
        "SORDINO_MIN_RANK is not a variable of Sordino; did you mean SORDINO_MIN_RANKS?"
    ]
    assert line == "SORDINO_TIMOUT_S is not a variable of Sordino; did you mean SORDINO_TIMEOUT_S?"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("Sordino 0.")
