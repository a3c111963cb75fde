"""Parts of examples/train.py."""
