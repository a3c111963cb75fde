"""An invalid value of a setting raises a UsageError that names the setting, for each setting of each algorithm."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from sordino.algorithms import Crossover, names, resolve
from sordino.algorithms.settings import configured
from sordino.errors import UsageError

SETTINGS = [(name, one.name) for name in names() for one in fields(resolve(name))]
ANYTHING = (
    *("nan", "blocks", "", b"x", None, True, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), object()),
    *([], (), [1], ["*"], [[0.0, 1.0], [1.0, 0.0]], [["x"]], [[0.0, 1.0], [1.0]], {}, {0: 1}, {"a": 1}, {1: 1}),
)


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_any_value_is_taken_or_refused_by_name(name: str, setting: str) -> None:
    kind = type(resolve(name))
    refused = 0
    for value in ANYTHING:
        try:
            kind(**{setting: value})
        except UsageError as error:
            assert str(error).startswith(f"{kind.__name__}("), error
            refused += 1
    assert refused >= len(ANYTHING) // 2  # every setting has invalid values


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"bucket_bytes": "nan"}, r"Crossover\(bucket_bytes='nan'\): must be an integer"),
        ({"interval": True}, r"Crossover\(interval=True\): must be an integer"),
        ({"interval": 10**30}, "must be an integer within 64 bits"),
        ({"segments": 1.5}, "must be 'model', 'blocks', a number of bytes, or patterns of names"),
        ({"roulette": [[0, 1], [1]]}, "must be None or a square matrix"),
    ],
)
def test_the_message_says_what_it_must_be(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Crossover(**settings)


def test_a_word_from_a_command_line_is_refused_like_a_value() -> None:
    with pytest.raises(UsageError, match=r"Crossover\(bucket_bytes='nan'\): must be an integer"):
        configured(Crossover, "crossover", ["bucket_bytes=nan"])
    assert configured(Crossover, "crossover", ["bucket_bytes=4096", "segments=model"]).bucket_bytes == 4096
