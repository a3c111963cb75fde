"""Layered SGD: exposed communication while batches are loaded, and scaling (layered.py)."""
