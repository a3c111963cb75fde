"""Parts of the benchmark of collectives that the package does not have: jobs on emulated hosts."""
