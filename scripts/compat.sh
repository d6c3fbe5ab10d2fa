#!/usr/bin/env bash
# Builds ringcomm with the oldest, the main and the newest torch that it supports, each in a virtual
# environment of its own under build/compat. Then it runs the demo, the tests of those files that
# use torch's private names, and those of windows and hooks, which only newer versions have. A
# torch that cannot be installed or imported here is at least compiled against: its headers come out
# of any wheel of it.
#   TORCHES="2.12 2.14" make compat      other versions
#   HEADERS_ONLY=1 make compat           no large installs: compile only
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
scripts/prerequisites.sh
root=$PWD/build/compat
mkdir -p "$root"

quietly() {  # LOG COMMAND...: shows the end of the log when the command fails
  local log=$1
  shift
  "$@" >"$log" 2>&1 || { tail -15 "$log" >&2; return 1; }
}

# Everything runs from a copy: an editable build in this folder must stay what it is.
copy() {
  rm -rf "$1" && mkdir -p "$1"
  cp -r csrc ringcomm CMakeLists.txt setup.py pyproject.toml README.md examples lab tests "$1"
  rm -f "$1"/ringcomm/*.so "$1/ringcomm/_build_info.py"
}

runs() {  # VERSION: 0 when all of it ran, 1 when this torch cannot be used here, 2 on our failure
  local env=$root/venv-$1 log=$root/$1.log
  [ -z "${HEADERS_ONLY:-}" ] || return 1
  [ -x "$env/bin/python" ] || "$python" -m venv "$env"
  grep -v '^torch=' requirements.txt >"$root/requirements.txt"
  grep '^pytest' requirements-dev.txt >>"$root/requirements.txt"
  # shellcheck disable=SC2086  # PIP_ARGS holds several words
  "$env/bin/pip" install -q ${PIP_ARGS:-} "torch==$1.*" -r "$root/requirements.txt" >"$log" 2>&1 &&
    "$env/bin/python" -c 'import torch' >>"$log" 2>&1 || return 1
  copy "$root/src-$1"
  PATH="$env/bin:$PATH" quietly "$log" "$env/bin/pip" install -v --no-build-isolation --no-deps \
    "$root/src-$1" || return 2
  (
    cd "$root"
    export OMP_NUM_THREADS=1
    "$env/bin/python" -c 'import ringcomm; print(ringcomm.Options())' >>"$log" &&
      "$env/bin/torchrun" --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        "src-$1/examples/train_digits.py" 2>>"$log" &&
      cd "src-$1" && rm -r ringcomm &&  # what was installed is tested
      "$env/bin/python" -m pytest -q tests/elastic/test_ddp_change.py \
        tests/elastic/test_sharded.py tests/elastic/test_units.py tests/backend/test_window.py \
        tests/backend/test_torch_hooks.py >>"$log" 2>&1
  ) || { tail -15 "$log" >&2; return 2; }
}

compiles() {  # VERSION: against the headers in a wheel of any platform
  local env=$root/tools headers=$root/headers-$1 platform
  if ! [ -x "$env/bin/ninja" ]; then
    "$python" -m venv "$env"
    grep -E '^(cmake|ninja)=' requirements.txt >"$root/tools.txt"
    "$env/bin/pip" install -q -r "$root/tools.txt"
  fi
  for platform in macosx_14_0_arm64 manylinux_2_28_aarch64 manylinux_2_28_x86_64; do
    [ ! -e "$headers/torch" ] || break
    # shellcheck disable=SC2086
    "$env/bin/pip" download -q ${PIP_ARGS:-} --no-deps --only-binary :all: --platform $platform \
      -d "$headers" "torch==$1.*" >"$root/$1.log" 2>&1 || continue
    (cd "$headers" && "$python" -m zipfile -e torch-*.whl . && rm torch-*.whl)
  done
  [ -e "$headers/torch" ] || { tail -5 "$root/$1.log" >&2; return 1; }
  export PATH="$env/bin:$PATH"
  quietly "$root/$1.log" cmake -S . -B "$root/build-$1" -G Ninja \
    -DPython_EXECUTABLE="$(command -v "$python")" -DRINGCOMM_TORCH_DIRS="$headers/torch" &&
    quietly "$root/$1.log" cmake --build "$root/build-$1" --target ringcomm_torch ringcomm_core
}

failed=0
for torch in ${TORCHES:-2.11 2.13 2.15}; do
  result=0
  runs "$torch" || result=$?
  case $result in
    0) echo "torch $torch: built, ran the demo, and passed the tests of what differs between versions" ;;
    1)
      if compiles "$torch"; then
        echo "torch $torch: compiled against its headers; it was not installed here, so nothing ran"
      else
        echo "torch $torch: FAILED to compile against its headers" && failed=1
      fi
      ;;
    *) echo "torch $torch: FAILED, see $root/$torch.log" && failed=1 ;;
  esac
done
exit $failed
