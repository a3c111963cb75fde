// The MPI transport lives in libraries of its own, one an ABI (libsordino_mpi_openmpi.so, libsordino_mpi_mpich.so), of
// which one is opened at run time, so that the package imports, and says what is missing, where there is no MPI.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "transport/meeting.h"
#include "transport/transport.h"

namespace sordino::mpi {

// What init() was given: nothing (MPI_COMM_WORLD), a communicator as its Fortran handle (as mpi4py gives it), or
// world ranks.
struct Members {
  std::optional<int> fortran_handle;
  std::vector<int> ranks;
  Comparison comparison;
};

// The C functions that the plugin exports; loader.cc looks them up by these names.
using OpenFunction = Transport* (*)(const Members*, const Config*);
using DescribeFunction = const char* (*)();  // the MPI library found at run time
using InitializedFunction = bool (*)();      // whether somebody (mpi4py) has initialized MPI already
using TakesCudaFunction = bool (*)();        // whether that library says that it takes CUDA memory
inline constexpr const char* kOpenSymbol = "sordino_mpi_open";
inline constexpr const char* kDescribeSymbol = "sordino_mpi_describe";
inline constexpr const char* kInitializedSymbol = "sordino_mpi_initialized";
inline constexpr const char* kTakesCudaSymbol = "sordino_mpi_takes_cuda";

// These load the plugin on first use. NotBuilt if this build has none or there is no MPI that it was built for,
// TransportError if there is one that does not load.
std::unique_ptr<Transport> open(const Members& members, const Config& config);
std::string abi();  // openmpi or mpich
std::string describe();
bool initialized();
bool takes_cuda();

}  // namespace sordino::mpi
