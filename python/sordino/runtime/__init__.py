"""What strategies are made of; docs/extending.md names the building stones."""
