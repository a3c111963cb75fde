#include "base/error.h"
#include "device/cuda/cuda_device.h"

namespace sordino::cuda {

int count() { return 0; }

std::string obstacle() {
  return "this build of Sordino has no CUDA: put nvcc on PATH (or set CUDACXX) and install it again from source, or "
         "move the tensors to the CPU";
}

std::shared_ptr<Device> make_device(int) { throw NotBuilt(obstacle()); }

}  // namespace sordino::cuda
