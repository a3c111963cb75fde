// Features of this build, probes of MPI and UCX, memory limits, and environment variables.
#include <pybind11/stl.h>

#include "base/config.h"
#include "base/limits.h"
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
        if (std::string(build::kMpis).empty()) {
          info["mpi"] = py::none();
        } else {
          py::dict mpi;
          mpi["library"] = build::kMpis;
          mpi["mpicc"] = build::kMpicc;
          info["mpi"] = mpi;
        }
        info["ucx"] = build::kUcx;
        return info;
      },
      "The features of this build: {version, compiler, cpu_level, cuda, ucx, mpi}. cuda, ucx: description, empty if "
      "not built; mpi: {library, mpicc}, or None.");

  module.def(
      "probe_mpi",
      [] {
        py::dict found;
        try {
          found["abi"] = mpi::abi();
          found["library"] = mpi::describe();
          found["takes_cuda"] = mpi::takes_cuda();
          found["ok"] = true;
          found["absent"] = false;
          found["error"] = "";
        } catch (const Error& error) {
          found["abi"] = "";
          found["library"] = "";
          found["takes_cuda"] = false;
          found["ok"] = false;
          found["absent"] = dynamic_cast<const NotBuilt*>(&error) != nullptr;
          found["error"] = error.what();
        }
        return found;
      },
      "Load the MPI library, without initializing MPI: {ok, abi, library, takes_cuda, absent, error}. abi: "
      "'openmpi' or 'mpich'; takes_cuda: it accepts CUDA memory; absent: no MPI library was found; error: why it "
      "cannot be loaded.");

  module.def(
      "probe_ucx",
      [] {
        py::dict found;
        try {
          found["library"] = ucx::describe();
          found["absent"] = false;
          found["error"] = "";
        } catch (const Error& error) {
          found["library"] = "";
          found["absent"] = dynamic_cast<const NotBuilt*>(&error) != nullptr;
          found["error"] = error.what();
        }
        return found;
      },
      "Load UCX: {library, absent, error}. absent: no UCX library was found.");

  module.def(
      "limits",
      [](const std::string& root) {
        const Limits limits(root);
        py::dict found;
        found["memory"] = limits.memory();
        found["available_memory"] = limits.available_memory().bytes;
        return found;
      },
      py::arg("root") = "/",
      "Memory limits of this process, in bytes: {memory, available_memory}. memory: the limit of its control groups, "
      "None without a limit; available_memory: memory that it can still get now. root: folder that contains proc and "
      "sys.");

  module.def(
      "variables",
      [] {
        py::list all;
        for (const Variable& variable : documented_variables()) {
          all.append(py::make_tuple(variable.name, variable.alias, variable.fallback, variable.meaning));
        }
        return all;
      },
      "All environment variables that Sordino reads: (name, alias, default, meaning) of each.");
}

}  // namespace sordino::bindings
