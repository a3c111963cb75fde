#!/usr/bin/env bash
# Everything that needs a GPU, in one command (benchmarks/gpu/check.py): `benchmarks/gpu_check.sh --help`.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" -m benchmarks.gpu.check "$@"
