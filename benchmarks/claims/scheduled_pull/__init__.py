"""Wide-area gossip: pulls, serving, and one-sided MPI beside it (scheduled_pull.py); and the claims of its source."""
