"""Parts of gossip.py."""
