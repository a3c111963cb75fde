"""What examples/train.py is made of."""
