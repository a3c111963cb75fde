// The part of CUDA's driver interface that csrc/ uses, for the stand-in of this folder. Values are those of CUDA 13.
#pragma once

#include <cstddef>
#include <cstdint>

using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUdeviceptr = unsigned long long;
using cuuint64_t = std::uint64_t;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_INVALID_DEVICE = 101 };
enum CUdevice_attribute {
  CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = 98,
  CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 123,
};
enum CUstreamWriteValue_flags { CU_STREAM_WRITE_VALUE_DEFAULT = 0 };
enum CUstreamWaitValue_flags { CU_STREAM_WAIT_VALUE_GEQ = 0, CU_STREAM_WAIT_VALUE_FLUSH = 1 << 30 };
