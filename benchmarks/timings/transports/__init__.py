"""Parts of transports.py and record.py."""
