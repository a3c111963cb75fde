"""The reports of the benchmarks on a GPU (gpu_kernels.py, gpu_ranks.py, gpu_step.py)."""
