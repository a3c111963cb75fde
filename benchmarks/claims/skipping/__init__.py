"""Parameter skipping: what detection costs, accuracy against bytes, and communication (skipping.py)."""
