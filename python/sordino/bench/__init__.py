"""Benchmarks, each compared with a floor or a peer in the same run. `benchmarks/README.md` explains how to run them."""
