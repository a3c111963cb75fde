"""Parts of the benchmarks that measure time, with a folder for each script."""
