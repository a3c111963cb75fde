"""Errors that are planted on purpose in a copy of the sources, one at a time, to show that the tests catch them."""
