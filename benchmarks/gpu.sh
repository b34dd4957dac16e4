#!/usr/bin/env bash
# All that a quarter of an hour on a GPU is to measure, by one command, from a checkout: bash benchmarks/gpu.sh
# Results are written into $OUT (benchmarks/results without it), row by row; the same command goes on from them,
# and from those that are committed.
set -eu
cd "$(dirname "$0")/.."
if [ -n "${OUT:-}" ]; then cp -n benchmarks/results/gpu.json "$OUT/"; fi
export PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2
export XLA_PYTHON_CLIENT_PREALLOCATE=false # PyTorch needs memory beside JAX
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-/tmp/cspd-jax-gpu-programs}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
exec python3 benchmarks/gpu.py --file "${OUT:-benchmarks/results}/gpu.json" "$@"
