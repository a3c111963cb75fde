#include "base/error.h"
#include "base/plugin.h"
#include "device/cuda/cuda_device.h"

namespace sordino::cuda {
namespace {

struct Found {
  const Plugin* plugin = nullptr;
  std::string obstacle;  // why there is no plugin
};

Found look() {
  const auto path = plugin::path_of("libsordino_cuda.so");
  if (!std::filesystem::exists(path)) {
    return {nullptr,
            "this build of Sordino has no CUDA: put nvcc on PATH (or set CUDACXX) and install it again from source, or "
            "move the tensors to the CPU"};
  }
  std::string why;
  void* library = plugin::open(path, why);
  if (library == nullptr) return {nullptr, "Sordino's library for CUDA does not load: " + why};
  return {reinterpret_cast<PluginFunction>(plugin::symbol(library, kPluginSymbol))(), ""};
}

const Found& found() {
  static const Found found = look();
  return found;
}

}  // namespace

std::string description() { return found().plugin != nullptr ? found().plugin->description : ""; }

int count() { return found().plugin != nullptr ? found().plugin->count() : 0; }

std::string obstacle() { return found().plugin != nullptr ? found().plugin->obstacle() : found().obstacle; }

std::shared_ptr<Device> make_device(int ordinal) {
  if (found().plugin == nullptr) throw NotBuilt(found().obstacle);
  return found().plugin->make_device(ordinal);
}

}  // namespace sordino::cuda
