"""Checks that run on every transport: on threads (tests/python) and under mpirun (tests/mp).

A check is a function that every rank calls; it asserts what must hold on its rank, and hands what must be equal on all
ranks, bit for bit, to `seat.same`. The comparison is made outside of the library (registry.py).
"""
