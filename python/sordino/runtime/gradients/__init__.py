"""Reduction of gradients during backward."""
