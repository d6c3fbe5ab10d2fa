#!/usr/bin/env bash
# Names everything that is missing to build ringcomm, in one sentence with the command that installs
# it, and fails; says nothing when all is there. $PYTHON and $CXX choose the tools.
set -euo pipefail

python=${PYTHON:-python3}
compiler=${CXX:-c++}
apt="apt install python3-venv python3-dev g++ make libssl-dev"
missing=()

fail() {
  echo "ringcomm: $*" >&2
  exit 1
}

if ! command -v "$python" >/dev/null; then
  missing+=("Python (python3)")
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  fail "Python 3.10 or newer is needed and $python is $version: set PYTHON=… to a newer one"
else
  "$python" -c 'import sys, venv
if sys.prefix == sys.base_prefix: import ensurepip' 2>/dev/null || missing+=("python3-venv")
  "$python" -c 'import os, sysconfig
open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || missing+=("python3-dev")
fi
if ! command -v "${compiler%% *}" >/dev/null; then
  missing+=("a C++ compiler (g++)")
else
  standard=$($compiler -std=c++20 -dM -E -x c++ /dev/null 2>/dev/null | sed -n 's/.*__cplusplus //p')
  [ "${standard%L}" -ge 202002 ] 2>/dev/null ||
    fail "$compiler $($compiler -dumpversion) is too old for C++20: \`apt install g++-11\`, or newer," \
      "and set CXX to it"
  echo '#include <openssl/hmac.h>' | $compiler -E -x c++ - >/dev/null 2>&1 ||
    missing+=("the headers of OpenSSL (libssl-dev)")
fi
command -v make >/dev/null || missing+=("make")

if [ ${#missing[@]} -gt 0 ]; then
  list=$(printf ', %s' "${missing[@]}")
  fail "missing ${list:2}: install with \`$apt\`"
fi
