// The part of NCCL's public C interface that we use, in our own declarations. The library is opened at run time, so one
// build runs with any NCCL (2.14 or later), or without one.
#pragma once

#include <climits>
#include <cstddef>

namespace sordino::nccl {

struct Comm;  // NCCL's ncclComm

struct UniqueId {
  char internal[128];
};

// All enumerations are ints in the interface.
using Result = int;
inline constexpr Result kSuccess = 0, kUnhandledCudaError = 1, kSystemError = 2, kInternalError = 3,
                        kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;

using Type = int;
inline constexpr Type kTypeInt8 = 0, kTypeUInt8 = 1, kTypeInt32 = 2, kTypeUInt32 = 3, kTypeInt64 = 4, kTypeUInt64 = 5,
                      kTypeFloat16 = 6, kTypeFloat32 = 7, kTypeFloat64 = 8, kTypeBFloat16 = 9;

using Op = int;
inline constexpr Op kOpSum = 0, kOpProduct = 1, kOpMax = 2, kOpMin = 3, kOpAverage = 4;

// The layout of 2.14, the first version with non-blocking communicators. Later versions add fields at the end, and
// accept the shorter form from a caller that states this version. NCCL checks `version` as well as `size`, so the two
// must match. `padding` lies within `size`, where 2.17 has its next field, so it is set to "undefined".
struct Settings {
  static constexpr int kUndefined = INT_MIN;

  std::size_t size = sizeof(Settings);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = kUndefined;
  int padding = kUndefined;
};
static_assert(sizeof(Settings) == 24 && offsetof(Settings, blocking) == 16);

inline constexpr int kOldestVersion = 21400;

// A stream is a cudaStream_t, which is a pointer.
struct Api {
  Result (*get_version)(int*);
  Result (*get_unique_id)(UniqueId*);
  Result (*init_rank)(Comm**, int size, UniqueId, int rank, Settings*);
  Result (*finalize)(Comm*);
  Result (*destroy)(Comm*);
  Result (*abort)(Comm*);
  Result (*async_error)(Comm*, Result*);
  const char* (*error_string)(Result);
  const char* (*last_error)(Comm*);
  Result (*group_start)();
  Result (*group_end)();
  Result (*all_reduce)(const void* in, void* out, std::size_t count, Type, Op, Comm*, void* stream);
  Result (*reduce)(const void* in, void* out, std::size_t count, Type, Op, int root, Comm*, void* stream);
  Result (*broadcast)(const void* in, void* out, std::size_t count, Type, int root, Comm*, void* stream);
  Result (*reduce_scatter)(const void* in, void* out, std::size_t count_of_out, Type, Op, Comm*, void* stream);
  Result (*all_gather)(const void* in, void* out, std::size_t count_of_in, Type, Comm*, void* stream);
  Result (*send)(const void* in, std::size_t count, Type, int to, Comm*, void* stream);
  Result (*receive)(void* out, std::size_t count, Type, int from, Comm*, void* stream);
};

}  // namespace sordino::nccl
