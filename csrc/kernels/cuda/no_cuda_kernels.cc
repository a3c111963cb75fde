// cuda_kernels.h where there was no CUDA compiler.
#include "kernels/cuda/cuda_kernels.h"

namespace sordino::kernels::cuda {

bool built() { return false; }

std::unique_ptr<Kernels> make(int) {
  throw NotBuilt(
      "Sordino was built without CUDA: put nvcc on PATH (or set CUDACXX to it) and install again with "
      "pip install --force-reinstall --no-cache-dir sordino");
}

}  // namespace sordino::kernels::cuda
