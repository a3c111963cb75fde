"""Parts of local_sgd.py."""
