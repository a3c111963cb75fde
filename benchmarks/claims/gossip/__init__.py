"""Gossip: exchanges, finding peers, and scaling over slow links (gossip.py)."""
