// Finds NCCL at run time.
#pragma once

#include <string>

#include "transport/nccl/api.h"

namespace sordino::nccl {

// Opens the library on first use: the file that SORDINO_NCCL names, else the copy that this process has loaded already
// (torch's: two copies would not know of each other), else the file of hint(), else what the system finds. NotBuilt,
// which says what to do, where there is none that serves. A failure is not remembered: a hint may come later.
const Api& api();

// Whether api() would give something.
bool available();

// Where a libnccl.so.2 may lie (a Python package's). Without effect once the library is open.
void hint(const std::string& path);

// Whether it takes several ranks on one device: from 2.30 on, where NCCL_MULTI_RANK_GPU_ENABLE=1.
bool shares_devices();

// "NCCL 2.27.3, libnccl.so.2"; throws what api() throws.
std::string describe();

}  // namespace sordino::nccl
