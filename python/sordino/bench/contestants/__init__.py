"""Libraries that the benchmark of collectives compares, their jobs, and reports of the times."""
