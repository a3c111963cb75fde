// Functions of the stand-in for CUDA's runtime (fake_cudart.cc) in addition to the runtime's own.
#pragma once

#include <string>
#include <vector>

namespace sordino::test {

// The (mangled) names of the launched kernels. Not to be called while another thread launches.
std::vector<std::string>& launches();

}  // namespace sordino::test
