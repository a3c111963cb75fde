"""Benchmarks, each against a floor or a peer measured in the same run. `benchmarks/README.md` says how to run them."""
