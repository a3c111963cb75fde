"""Parts of the benchmarks that measure time, a folder for each script."""
