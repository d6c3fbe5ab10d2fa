#!/usr/bin/env bash
# Builds ringcomm into the Python environment on PATH, editable; `build.sh tests` builds the C++
# test programs too, into build/tests. Does nothing when nothing that goes into it has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

tests=${1:-}
mkdir -p build
exec 9>build/build.lock
flock 9

key=$( (
  find csrc tests/cpp tests/sim benchmarks/cpp CMakeLists.txt setup.py pyproject.toml ringcomm/_build_info.py.in -type f \
    ! -name 'test_*' -print0 2>/dev/null | LC_ALL=C sort -z | xargs -0 sha256sum
  python -c 'import sys, importlib.metadata as m; print(sys.executable, m.version("torch"))'
  echo "${CXX:-} ${CXXFLAGS:-} ${CMAKE_ARGS:-} ${RINGCOMM_SANITIZE:-} ${RINGCOMM_WERROR:-} ${RINGCOMM_CUDA:-auto} ${RINGCOMM_CUDA_ARCHS:-}"
) | sha256sum)
where='from importlib.util import find_spec; print(find_spec("ringcomm").origin)'
if [ "$(cat "build/built${tests:+-$tests}" 2>/dev/null)" = "$key" ] &&
  compgen -G "ringcomm/_C_torch$(python -c 'import importlib.metadata as m; print("_".join(m.version("torch").split(".")[:2]))').*.so" >/dev/null && [ -e ringcomm/_build_info.py ] &&
  [ "$(cd / && python -c "$where" 2>/dev/null)" = "$PWD/ringcomm/__init__.py" ]; then
  exit 0
fi

echo "ringcomm: building the library${tests:+ and the C++ test programs}" >&2
rm -f build/built build/built-tests
[ -z "$tests" ] ||
  export CMAKE_ARGS="-DRINGCOMM_TESTS=ON -DCMAKE_RUNTIME_OUTPUT_DIRECTORY=$PWD/build/tests ${CMAKE_ARGS:-}"
if ! python -m pip install -v --disable-pip-version-check --no-build-isolation --no-deps -e . \
  >build/build.log 2>&1 9>&-; then
  grep -E 'error:|Error|^ *ringcomm (needs|builds) ' build/build.log | grep -v 'subprocess-exited\|CalledProcess' | head -20 >&2 || true
  echo "ringcomm: the build failed; its whole output is in build/build.log" >&2
  exit 1
fi
echo "$key" >build/built
[ -z "$tests" ] || echo "$key" >build/built-tests
