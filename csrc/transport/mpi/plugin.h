// The MPI transport consists of one library per ABI (libsordino_mpi_openmpi.so, libsordino_mpi_mpich.so), one of which
// is opened at run time. So the package can be imported without any MPI, and can name the missing library.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "transport/meeting.h"
#include "transport/transport.h"

namespace sordino::mpi {

// Arguments of init(): none (MPI_COMM_WORLD), a communicator as its Fortran handle (which mpi4py provides), or world
// ranks.
struct Members {
  std::optional<int> fortran_handle;
  std::vector<int> ranks;
  Comparison comparison;
};

// C functions that the plugin exports. loader.cc looks them up by these names.
using OpenFunction = Transport* (*)(const Members*, const Config*);
using DescribeFunction = const char* (*)();  // the MPI library found at run time
using InitializedFunction = bool (*)();      // whether MPI is already initialized (mpi4py)
using TakesCudaFunction = bool (*)();        // whether that library reports that it takes CUDA memory
inline constexpr const char* kOpenSymbol = "sordino_mpi_open";
inline constexpr const char* kDescribeSymbol = "sordino_mpi_describe";
inline constexpr const char* kInitializedSymbol = "sordino_mpi_initialized";
inline constexpr const char* kTakesCudaSymbol = "sordino_mpi_takes_cuda";

// These load the plugin on first use. They throw NotBuilt if this build lacks it, or if there is no MPI that it was
// built for, and TransportError if there is one that does not load.
std::unique_ptr<Transport> open(const Members& members, const Config& config);
std::string abi();  // openmpi or mpich
std::string describe();
bool initialized();
bool takes_cuda();

}  // namespace sordino::mpi
