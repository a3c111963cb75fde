"""The ways to start ranks and to carry their bytes, measured: a module for each part, and the reports of all."""
