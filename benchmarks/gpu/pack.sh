#!/usr/bin/env bash
# Prepares a folder for a machine with one GPU, without compilers and without a network:
#   benchmarks/gpu/pack.sh [FOLDER]      default: build/gpu-pack
# FOLDER/pkg is ringcomm, FOLDER/gpu_probe the probe. Both are built here, by nvcc, for the GPU
# architectures $ARCHS (default 90) and for $PYTHON (default: python on PATH) with its torch. There
# the same Python and torch are needed, and this source:
#   PYTHONPATH=FOLDER/pkg python3 benchmarks/gpu_check.py --no-build --probe FOLDER/gpu_probe --group 1
set -euo pipefail
folder=$(realpath -m "${1:-$(dirname "$0")/../../build/gpu-pack}")
cd "$(dirname "$0")/../.."

python=${PYTHON:-python}
archs=${ARCHS:-90}
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
[ -x "$nvcc" ] || {
  echo "ringcomm: nvcc is needed: put it on PATH, or set CUDA_HOME" >&2
  exit 1
}

mkdir -p "$folder"
rm -rf "$folder/pkg"
RINGCOMM_CUDA=on RINGCOMM_CUDA_ARCHS=$archs CUDACXX=$nvcc \
  "$python" setup.py -q build --build-lib "$folder/pkg" >"$folder/build.log" 2>&1 || {
  tail -20 "$folder/build.log" >&2
  exit 1
}
codes=()
for arch in ${archs//[,;]/ }; do
  codes+=("-gencode=arch=compute_$arch,code=sm_$arch")
done
"$nvcc" -O3 -std=c++17 "${codes[@]}" benchmarks/gpu/probe.cu -o "$folder/gpu_probe"
echo "$folder"
