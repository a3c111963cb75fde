"""Parts of soak.py, soak_joins.py and joining.py: a job whose ranks are killed, its course, and a report."""
