"""What the soak is made of: a job whose ranks are killed, its course, and its report (soak.py)."""
