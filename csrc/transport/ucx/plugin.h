// The UCX link is a library of its own (libsordino_ucx.so) that is opened at run time. So the package can be imported
// without UCX, and can name the missing library.
#pragma once

#include <memory>
#include <string>

#include "base/config.h"
#include "transport/link.h"
#include "transport/meeting.h"

namespace sordino::ucx {

// C functions that the plugin exports. loader.cc looks them up by these names.
using ConnectFunction = Link* (*)(Meeting*, const Config*, const std::string* token);
using DescribeFunction = const char* (*)();  // the UCX found at run time
inline constexpr const char* kConnectSymbol = "sordino_ucx_connect";
inline constexpr const char* kDescribeSymbol = "sordino_ucx_describe";

// Folder of the libraries of UCX's wheel (site-packages/libucx/lib), used if no other UCX is found.
void hint(const std::string& folder);

// These load the plugin on first use. They throw NotBuilt if this build lacks it or if there is no UCX, and
// TransportError if UCX does not load.

// Makes the link between the ranks of a meeting. Collective call. The link drops messages from senders that do not know
// the token (the job's secret, if any) and a secret that the ranks draw.
std::unique_ptr<Link> connect(Meeting& meeting, const Config& config, const std::string& token);
std::string describe();  // "UCX 1.22.0"

}  // namespace sordino::ucx
