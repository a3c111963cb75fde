"""Parts of scheduled_pull.py."""
