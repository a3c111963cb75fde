"""Building blocks of strategies, described in docs/extending.md."""
