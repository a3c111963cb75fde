"""Part of the benchmark of collectives that `sordino.bench` does not have: jobs on emulated hosts."""
