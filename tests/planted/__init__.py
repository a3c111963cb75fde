"""Errors that are put into a copy of the sources on purpose, one after the other: the tests are to catch them."""
