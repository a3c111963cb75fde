// Finds NCCL at run time.
#pragma once

#include <string>

#include "transport/nccl/api.h"

namespace sordino::nccl {

// Opens the library on first use. Candidates: the file named by SORDINO_NCCL, else the copy that this process has
// already loaded (torch's: two copies would not know of each other), else the file of hint(), else the one that the
// system finds. Throws NotBuilt, with the fix, if none works. A failure is not remembered, because a hint may come
// later.
const Api& api();

// True if api() would succeed.
bool available();

// Path of a libnccl.so.2 (of a Python package) to try. No effect once the library is open.
void hint(const std::string& path);

// True if NCCL supports several ranks on one device: since 2.30, with NCCL_MULTI_RANK_GPU_ENABLE=1.
bool shares_devices();

// "NCCL 2.27.3, libnccl.so.2". Throws the errors of api().
std::string describe();

}  // namespace sordino::nccl
