#include "bindings/bindings.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ core of Sordino: worlds of ranks, collectives, arenas and kernels.";
  sordino::bindings::register_errors(module);
  sordino::bindings::register_build(module);
  sordino::bindings::register_log(module);
  sordino::bindings::register_kernels(module);
  sordino::bindings::register_device(module);
  sordino::bindings::register_cuda_kernels(module);
  sordino::bindings::register_operations(module);
  sordino::bindings::register_world(module);
  sordino::bindings::register_worlds(module);
  sordino::bindings::register_arena(module);
  sordino::bindings::register_topology(module);
  sordino::bindings::register_services(module);
  sordino::bindings::register_gradient_counter(module);
}
