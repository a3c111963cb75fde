"""Callbacks are called in the order in which their owners have added them."""

from __future__ import annotations

from sordino.runtime.callbacks import WeakMethods


class Owner:
    def method(self) -> None:
        """Do nothing."""


def test_an_object_does_not_take_the_place_of_a_former_one() -> None:
    """A new object may get the id() of a deleted one, on some ranks and not on others."""
    methods = WeakMethods()
    first, second = Owner(), Owner()
    place = id(first)
    methods.add(first.method)
    methods.add(second.method)
    del first
    others = []
    while id(third := Owner()) != place:
        others.append(third)
        assert len(others) < 1000
    methods.add(third.method)
    assert methods.living() == [second.method, third.method]
