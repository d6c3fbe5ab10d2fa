#!/usr/bin/env bash
# Prepares a folder for a bare machine with one GPU: neither compilers nor a network are needed there.
#   benchmarks/gpu_pack.sh [FOLDER]      default: .gpu
# FOLDER/pkg is ringcomm and FOLDER/gpu_probe the probe, both built here by nvcc, for the GPU
# architectures $ARCHS (default 90). FOLDER/gpu_kernels times kernels. FOLDER/include has OpenSSL's headers, for a build there after
# all. Needs nvcc, OpenSSL's headers and no GPU; the first run loads 500 MB for torch. There the same
# Python and torch are needed, and this source:
#   PYTHONPATH=FOLDER/pkg python3 benchmarks/gpu_check.py --no-build --probe FOLDER/gpu_probe \
#       --minutes 9 --out DIR
# It builds for Python 3.12 and torch 2.11.0 with CUDA 13.0, in an environment of its own,
# $GPU_VENV (default build/gpu-venv). $PYTHON names an interpreter that has another torch instead.
set -euo pipefail
folder=$(realpath -m "${1:-$(dirname "$0")/../.gpu}")
cd "$(dirname "$0")/.."

stop() {
  echo "ringcomm: $1" >&2
  exit 1
}

environment() { # a Python 3.12 with torch's wheel alone: its CUDA packages are not compiled against
  local base
  base=$(command -v python3.12 || true)
  "${base:-false}" -c '' 2>/dev/null || base=$(ls -d "$HOME"/.pyenv/versions/3.12*/bin/python 2>/dev/null | tail -1)
  [ -n "$base" ] || stop "Python 3.12 is needed: install it, or set PYTHON to one that has torch"
  "$base" -m venv "$1"
  "$1/bin/pip" install -q cmake ninja "setuptools>=77" wheel numpy typing-extensions
  "$1/bin/pip" install -q --no-deps torch==2.11.0
  touch "$1/complete"
}

archs=${ARCHS:-90}
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
[ -x "$nvcc" ] || stop "nvcc is needed: put it on PATH, or set CUDA_HOME"
python=${PYTHON:-}
if [ -z "$python" ]; then
  venv=$(realpath -m "${GPU_VENV:-build/gpu-venv}")
  [ -e "$venv/complete" ] || environment "$venv"
  python=$venv/bin/python
fi
python=$(command -v "$python") || stop "there is no ${PYTHON:-}"

mkdir -p "$folder/include"
rm -rf "$folder/pkg"
PATH="$(dirname "$python"):$PATH" RINGCOMM_CUDA=on RINGCOMM_CUDA_ARCHS=$archs CUDACXX=$nvcc \
  "$python" setup.py -q build --build-lib "$folder/pkg" >"$folder/build.log" 2>&1 || {
  tail -20 "$folder/build.log" >&2
  exit 1
}
codes=()
for arch in ${archs//[,;]/ }; do
  codes+=("-gencode=arch=compute_$arch,code=sm_$arch")
done
"$nvcc" -O3 -std=c++17 "${codes[@]}" benchmarks/gpu/probe.cu -o "$folder/gpu_probe"
# The program of the stage "kernels", with the engine's own types: see csrc/device/api.h.
PATH="$(dirname "$python"):$PATH" cmake -S . -B "$folder/build" -G Ninja -DRINGCOMM_TESTS=ON \
  -DRINGCOMM_CUDA=off -DPython_EXECUTABLE="$python" -DCMAKE_RUNTIME_OUTPUT_DIRECTORY="$folder" \
  >"$folder/build.log"
PATH="$(dirname "$python"):$PATH" cmake --build "$folder/build" --target gpu_kernels >>"$folder/build.log"
rm -rf "$folder/build"
for headers in /usr/include /usr/include/*-linux-gnu; do # the second has what the machine decides
  [ ! -d "$headers/openssl" ] || cp -r "$headers/openssl" "$folder/include/"
done
"$python" -c 'import sys; from importlib.metadata import version
print("Python", sys.version.split()[0] + ", torch", version("torch"))' >"$folder/built_for.txt"
echo "$folder: $(du -sh "$folder" | cut -f1), for $(cat "$folder/built_for.txt"), sm_${archs//[,;]/ sm_}"
