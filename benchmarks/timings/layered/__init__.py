"""Parts of layered.py."""
