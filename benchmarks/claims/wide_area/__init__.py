"""Wide-area gossip: pulls, serving, and one-sided MPI beside it (wide_area.py); and the claims of its source."""
