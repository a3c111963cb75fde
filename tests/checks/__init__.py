"""Checks that run on every transport: on threads (tests/python) and under mpirun (tests/mp).

A check is a function that every rank calls. It asserts what must hold on its rank. It passes values that must be equal
on all ranks, bit for bit, to `seat.same`; registry.py compares them without the library.
"""
