// What was built, and what of it works on this machine.
#include <pybind11/stl.h>

#include "base/config.h"
#include "bindings/bindings.h"
#include "build_info.h"
#include "device/cuda/cuda_device.h"
#include "kernels/kernels.h"
#include "transport/mpi/plugin.h"
#include "transport/ucx/plugin.h"

namespace sordino::bindings {

void register_build(py::module_& module) {
  module.attr("__version__") = build::kVersion;

  module.def(
      "build_info",
      [] {
        py::dict info;
        info["version"] = build::kVersion;
        info["compiler"] = build::kCompiler;
        info["cpu_level"] = std::string(kernels::level());
        info["cuda"] = cuda::description();
        if (std::string(build::kMpiLibrary).empty()) {
          info["mpi"] = py::none();
        } else {
          py::dict mpi;
          mpi["library"] = build::kMpiLibrary;
          mpi["mpicc"] = build::kMpicc;
          mpi["path"] = build::kMpiLibraryPath;
          info["mpi"] = mpi;
        }
        info["ucx"] = build::kUcx;
        return info;
      },
      "What this build contains: version, compiler, cpu_level, cuda and ucx (empty without), and mpi (library, mpicc, "
      "path) or None.");

  module.def(
      "probe_mpi",
      [] {
        py::dict found;
        try {
          found["library"] = mpi::describe();
          found["takes_cuda"] = mpi::takes_cuda();
          found["ok"] = true;
          found["error"] = "";
        } catch (const Error& error) {
          found["library"] = "";
          found["takes_cuda"] = false;
          found["ok"] = false;
          found["error"] = error.what();
        }
        return found;
      },
      "Whether the MPI library loads now, and takes CUDA memory: {ok, library, takes_cuda, error}. Does not initialize "
      "MPI.");

  module.def(
      "probe_ucx",
      [] {
        py::dict found;
        try {
          found["library"] = ucx::describe();
          found["error"] = "";
        } catch (const Error& error) {
          found["library"] = "";
          found["error"] = error.what();
        }
        return found;
      },
      "Whether UCX loads now: {library, error}, one of which is empty.");

  module.def(
      "variables",
      [] {
        py::list all;
        for (const Variable& variable : documented_variables()) {
          all.append(py::make_tuple(variable.name, variable.alias, variable.fallback, variable.meaning));
        }
        return all;
      },
      "Every environment variable: (name, alias, default, meaning).");
}

}  // namespace sordino::bindings
