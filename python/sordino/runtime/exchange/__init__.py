"""Exchanges of parameters between ranks, and the memory that they use."""
