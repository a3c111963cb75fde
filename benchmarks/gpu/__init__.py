"""The check on a GPU, and parts of the benchmarks gpu_kernels.py, gpu_ranks.py and gpu_step.py."""
