"""The CUDA kernels against copies within device memory; see sordino.bench.gpu_kernels."""

import sys

from sordino.bench.gpu_kernels import main

if __name__ == "__main__":
    sys.exit(main())
