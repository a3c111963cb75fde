// What the stand-in for CUDA's runtime (fake_cudart.cc) has beyond the runtime's own functions.
#pragma once

#include <string>
#include <vector>

namespace sordino::test {

// The (mangled) names of the kernels that have been launched. Not while another thread launches.
std::vector<std::string>& launches();

}  // namespace sordino::test
