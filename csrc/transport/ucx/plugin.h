// The link by UCX lives in a library of its own (libsordino_ucx.so) that is opened at run time, so that the package
// imports, and says what is missing, where there is no UCX.
#pragma once

#include <memory>
#include <string>

#include "base/config.h"
#include "transport/link.h"
#include "transport/meeting.h"

namespace sordino::ucx {

// The C functions that the plugin exports; loader.cc looks them up by these names.
using ConnectFunction = Link* (*)(Meeting*, const Config*, const std::string* token);
using DescribeFunction = const char* (*)();  // the UCX found at run time
inline constexpr const char* kConnectSymbol = "sordino_ucx_connect";
inline constexpr const char* kDescribeSymbol = "sordino_ucx_describe";

// The folder with the libraries of UCX's wheel (site-packages/libucx/lib), for where no other UCX is found.
void hint(const std::string& folder);

// These load the plugin on first use. They throw NotBuilt if this build has none, or UCX does not load.

// Makes the link between ranks that meet. Collective. What comes without the token, the job's secret if it has one, and
// a secret that the ranks draw is dropped.
std::unique_ptr<Link> connect(Meeting& meeting, const Config& config, const std::string& token);
std::string describe();  // "UCX 1.22.0"

}  // namespace sordino::ucx
