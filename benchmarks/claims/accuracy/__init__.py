"""Test accuracy of gossip and AllReduce by mini-batch and by workers (accuracy.py)."""
