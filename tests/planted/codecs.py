"""Errors of the codecs on GPUs, and of the means of encoded values on any device."""

from __future__ import annotations

from planted.error import Error, checks, tests

_CODED = "csrc/kernels/cuda/coded.cuh"
_CODES = "csrc/kernels/cuda/codes.cu"
_LARGEST = "csrc/kernels/cuda/largest.cu"
_SCAN = "csrc/kernels/cuda/scan.cuh"
_MEAN = "python/sordino/runtime/exchange/compressed_mean.py"

_ON_KERNELS = ("cpp.test_cuda_kernels_on_cpu",)

ERRORS = [
    # ---- a code for each value
    Error(
        "a warp's largest magnitude leaves out half of its lanes",
        "off by one",
        _CODES,
        "distance = kWarp / 2; distance > 0",
        "distance = kWarp / 4; distance > 0",
        _ON_KERNELS,
    ),
    Error(
        "a warp adds up its lanes in another order than the CPU",
        "wrong order of summation",
        _SCAN,
        "distance = kWarp / 2; distance > 0; distance /= 2",
        "distance = 1; distance < kWarp; distance *= 2",
        _ON_KERNELS,
    ),
    Error(
        "the codes of a block that is not finite depend on the bits of its NaNs",
        "stale copy",
        _CODES,
        "found.finite ? static_cast<std::byte>(byte) : std::byte{0}",
        "static_cast<std::byte>(byte)",
        _ON_KERNELS,
    ),
    Error(
        "each lane counts a block that is not finite",
        "wrong weight",
        _CODES,
        "  if (lane == 0) {\n    store_packed",
        "  {\n    store_packed",
        _ON_KERNELS,
    ),
    Error(
        "the last block is encoded with what lies behind the values",
        "off by one",
        _CODES,
        "of_bytes[u][k] = at < count ? values[at] : 0;",
        "of_bytes[u][k] = values[at];",
        _ON_KERNELS,
    ),
    Error(
        "decoding takes a value's code from the neighbouring plane",
        "wrong bucket",
        _CODES,
        "plane = place >> plane_bits;",
        "plane = kCount - 1 - (place >> plane_bits);",
        _ON_KERNELS,
    ),
    Error(
        "a block begins one byte early in the encoded bytes",
        "misaligned access",
        _CODES,
        "encoded += number * blocks.bytes;",
        "encoded += number * (blocks.bytes - 1);",
        _ON_KERNELS,
    ),
    # ---- the largest of a block
    Error(
        "a histogram of magnitudes is cleared while others count",
        "missing wait",
        _LARGEST,
        "bins[bin] = 0;\n    __syncthreads();",
        "bins[bin] = 0;",
        _ON_KERNELS,
    ),
    Error(
        "one value too many that equals the bar is kept",
        "off by one",
        _LARGEST,
        "tie && ties_before < bar.ties",
        "tie && ties_before <= bar.ties",
        _ON_KERNELS,
    ),
    Error(
        "a warp reads how many values others keep before they have counted",
        "missing wait",
        _LARGEST,
        "of_warps[warp] = own;\n  __syncthreads();",
        "of_warps[warp] = own;",
        _ON_KERNELS,
    ),
    Error(
        "codes are written before the mean of the kept values is there",
        "missing wait",
        _LARGEST,
        "levels = found;\n    }\n    __syncthreads();",
        "levels = found;\n    }",
        _ON_KERNELS,
    ),
    Error(
        "the last byte of a block has bits of a value behind the last one",
        "off by one",
        _LARGEST,
        "filled < 8 && k < kept;",
        "filled < 8;",
        _ON_KERNELS,
    ),
    Error(
        "a position beyond the end is written",
        "misaligned access",
        _LARGEST,
        "    if (place >= count) continue;\n",
        "",
        _ON_KERNELS,
    ),
    Error(
        "values are added before the block is cleared",
        "missing wait",
        _LARGEST,
        "values[i] = 0;\n    __syncthreads();",
        "values[i] = 0;",
        _ON_KERNELS,
    ),
    Error(
        "the fourth load of a thread is left out",
        "lost message",
        _CODED,
        "      if (at < count) use(at, found[u]);",
        "      if (at < count && u < 3) use(at, found[u]);",
        _ON_KERNELS,
    ),
    # ---- means
    Error(
        "a NaN is warned of in every later step",
        "stale copy",
        _MEAN,
        "        self._infinite.value.zero_()\n",
        "",
        (tests("compressed_mean"),),
    ),
    Error(
        "ranks without a shard of the mean have memory for it",
        "wrong bucket",
        _MEAN,
        "torch.empty(0 if codec.gathered else self._shard, device",
        "torch.empty(self._shard, device",
        (tests("compressed_mean"),),
    ),
    Error(
        "bytes that have arrived are kept while others arrive",
        "stale copy",
        _MEAN,
        "        return received()\n",
        "        self._last = received()\n        return self._last\n",
        (tests("compressed_mean"),),
    ),
    Error(
        "a cast needs kernels of the core",
        "wrong stream",
        _MEAN,
        "self._sends and codec.in_core else",
        "self._sends else",
        (tests("compressed_mean"),),
    ),
    Error(
        "one rank alone needs kernels for values that it does not encode",
        "wrong stream",
        _MEAN,
        "if self._sends and codec",
        "if codec",
        (tests("compressed_mean"),),
    ),
    Error(
        "each bucket waits for its encoding before the next one is sent",
        "missing wait",
        "python/sordino/runtime/gradients/encoded_buckets.py",
        "        mean.run(sent)\n",
        "        mean.run(sent)\n        mean.report()\n",
        (tests("compressed_mean"),),
    ),
    Error(
        "a number that was not read is forgotten when the next mean begins",
        "lost message",
        _MEAN,
        "        self.report()\n        self._work[: self.count].copy_(values)",
        "        self._work[: self.count].copy_(values)",
        (tests("compressed_mean"),),
    ),
    Error(
        "a hook reports its buckets before the last one is sent",
        "missing wait",
        "python/sordino/distributed/hooks.py",
        "        if bucket.is_last():\n            for _, each",
        "        if not bucket.is_last():\n            for _, each",
        (tests("compressed_mean"),),
    ),
    Error(
        "what an encoding has lost does not decay",
        "wrong weight",
        _MEAN,
        "return residual if self._kept == 1 else residual * self._kept",
        "return residual",
        (checks("sparse_loco"),),
    ),
    Error(
        "the host's kernels encode the memory of a device",
        "wrong stream",
        _MEAN,
        "core_device(device) if self._sends and codec.in_core else None",
        "None",
        (tests("compressed_mean"),),
    ),
]
