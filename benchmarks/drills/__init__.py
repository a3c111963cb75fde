"""Parts of the soak (soak.py): a job whose ranks are killed, the course of its steps, and the report."""
