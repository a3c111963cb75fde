"""Wide-area gossip: pulls, serving, one-sided MPI beside it, and the source's tables (wide_area.py)."""
