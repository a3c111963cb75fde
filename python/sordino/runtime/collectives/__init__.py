"""Collective operations on tensors and objects, and how to wait for them."""
